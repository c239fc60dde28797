"""A causal LM whose weights do not fit into memory: streamed as a forward reaches them.

>>> model = AutoModelForCausalLM.from_pretrained("path/or/name")     # doctest: +SKIP
>>> stream_weights(model, max_weight_bytes="3GiB")                   # doctest: +SKIP
>>> model.generate(**inputs)                                         # doctest: +SKIP
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kvboost.config import read_size
from kvboost.errors import ConfigError
from kvboost.weights.attach import Undo, attach_parts, attach_rows, attach_whole
from kvboost.weights.carrier import Brought, Carrier, DeviceCopies, Tensors
from kvboost.weights.layout import Holding, Layout, find_layout, piece_bytes, plan
from kvboost.weights.pages import HUGE_PAGE, MappedPages
from kvboost.weights.window import Piece, Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTRIBUTE = "kvboost_weights"  # of a model whose weights are streamed


def stream_weights(
    model: PreTrainedModel, max_weight_bytes: int | str, device: torch.device | str = "cpu"
) -> StreamedWeights:
    """Run `model` with at most `max_weight_bytes` of its weights in the memory of `device`.

    The model must be on the CPU. If it is to run there, its weights must be in memory-mapped
    files, as Transformers leaves them when it loads safetensors in their own dtype. They are read
    again and again: to change them in place has no effect. Undone by `close`.

    Raises:
        ConfigError: the budget is too small, or too much of the model cannot be streamed.
    """
    budget = read_size(max_weight_bytes)
    if not isinstance(budget, int) or budget < 1:
        raise ConfigError(
            f"max_weight_bytes={max_weight_bytes!r}: expected a whole number above 0, or a size "
            "such as '4GiB'"
        )
    if streamed(model) is not None:
        raise ConfigError("the weights of this model are streamed already")
    if model.device.type != "cpu":
        raise ConfigError(f"weights are streamed from the CPU, and the model is on {model.device}")
    target = torch.device(device)
    carrier = MappedPages() if target.type == "cpu" else DeviceCopies(target)
    return StreamedWeights(model, budget, carrier)


def streamed(model: torch.nn.Module) -> StreamedWeights | None:
    """The streamed weights of a model, if they are."""
    weights: StreamedWeights | None = getattr(model, ATTRIBUTE, None)
    return weights


@dataclass(frozen=True)
class WeightStats:
    """Where the bytes are, and what happened since the weights are streamed."""

    resident_bytes: int
    window_bytes: int
    peak_window_bytes: int
    streamed_bytes: int
    num_uses: int  # of pieces that come and go
    num_waits: int  # uses of a piece that was not there yet


class StreamedWeights:
    """The streamed weights of one model. One forward at a time."""

    def __init__(self, model: PreTrainedModel, max_weight_bytes: int, carrier: Carrier) -> None:
        """Let weights come and go; `stream_weights` chooses the carrier."""
        self.limit_bytes = limit_bytes = piece_bytes(max_weight_bytes)  # larger layers are cut
        layout = find_layout(model, carrier, limit_bytes)
        pieces = layout.pieces
        fixed_bytes = layout.fixed_bytes + (limit_bytes if layout.tables else 0)
        chosen = plan([p.size_bytes for p in pieces], fixed_bytes, max_weight_bytes)
        self._model, self._carrier = weakref.ref(model), carrier
        self._resident = {pieces[index] for index in chosen.resident}
        self._resident_bytes = fixed_bytes + sum(p.size_bytes for p in self._resident)
        self._window = Window(chosen.window_bytes, carrier.bring, carrier.drop)
        self._sources: dict[int, torch.Tensor] = {}  # of streamed tensors, by identity
        self._undo: list[Undo] = []
        weakref.finalize(model, self._window.close)
        setattr(model, ATTRIBUTE, self)
        try:
            self._settle(layout, num_rows=max(1, limit_bytes // HUGE_PAGE))
        except BaseException:  # most of all too little memory
            self.close()
            raise

    @property
    def stats(self) -> WeightStats:
        """Sizes and counts."""
        window = self._window
        return WeightStats(
            resident_bytes=self._resident_bytes,
            window_bytes=window.budget_bytes,
            peak_window_bytes=window.peak_bytes,
            streamed_bytes=window.brought_bytes,
            num_uses=window.num_uses,
            num_waits=window.num_waits,
        )

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where the numbers of a parameter or buffer are read from; `forget` what was read."""
        return self._sources.get(id(tensor), tensor)

    def forget(self, part: torch.Tensor) -> None:
        """Give up the memory of a part of a source, if it can be brought again."""
        if any(_is_within(part, source) for source in self._sources.values()):
            self._carrier.drop(Brought([part]))

    def close(self) -> None:
        """Give the model its weights back."""
        model = self._model()
        if model is not None and streamed(model) is self:
            delattr(model, ATTRIBUTE)
            while self._undo:
                self._undo.pop()()
        self._window.close()

    def reset(self) -> None:
        """Load the resident pieces and drop everything else, after other tensors were read.

        A page may be as large as 2 MB, so what lies beside a small tensor comes with it.
        """
        if self._carrier.is_in_place:
            self._carrier.drop(Brought(list(self._sources.values())))
            self._place_resident()

    def _place_resident(self) -> None:
        for piece in self._resident:
            piece.brought = Brought([self._carrier.place(tensor) for tensor in piece.source])

    def _settle(self, layout: Layout, num_rows: int) -> None:
        carrier = self._carrier
        if not carrier.is_in_place:
            self._place_resident()
        for tensor in layout.fixed:
            self._replace(tensor, carrier.place(tensor.data))
        for holding in layout.holdings:
            self._attach(holding)
        for table in layout.tables:
            self._attach_table(table, layout, num_rows)
        for piece in set(layout.pieces) - self._resident:
            piece.source = [carrier.host(tensor) for tensor in piece.source]
        self.reset()

    @contextmanager
    def _use(self, piece: Piece) -> Iterator[Tensors]:
        if piece in self._resident:
            assert piece.brought is not None
            yield piece.brought.tensors
            return
        with self._window.use(piece) as brought:
            self._carrier.await_arrival(brought)
            try:
                yield brought.tensors
            finally:
                self._carrier.note_use(brought)

    def _attach(self, holding: Holding) -> None:
        module, names, pieces = holding.module, holding.names, holding.pieces
        for name in names:
            self._send_away(getattr(module, name))
        if isinstance(module, torch.nn.Linear) and len(pieces) > 1:
            self._undo.append(attach_parts(module, pieces, self._use))
        elif pieces[0] not in self._resident:
            self._undo.append(attach_whole(module, names, pieces[0], self._use))
        elif pieces[0].brought is not None:
            for name, tensor in zip(names, pieces[0].brought.tensors, strict=True):
                self._replace(getattr(module, name), tensor)

    def _attach_table(self, table: torch.nn.Embedding, layout: Layout, num_at_once: int) -> None:
        self._send_away(table.weight)
        source, look_up, carrier = self._sources[id(table.weight)], table.forward, self._carrier
        if not carrier.is_in_place:
            look_up = partial(_look_up, source, carrier.device)
        # An output layer that has the same weight keeps what is resident of it.
        tied = [piece for piece in layout.pieces if _is_within(piece.source[0], source)]
        goes = [p.source[0] for p in tied if p not in self._resident] if tied else [source]
        drop = partial(carrier.drop, Brought(goes))
        self._undo.append(attach_rows(table, look_up, num_at_once, drop))

    def _send_away(self, tensor: torch.Tensor) -> None:
        """Remember the source of a tensor, and empty it if forwards compute on another device."""
        if id(tensor) not in self._sources:  # tied
            self._sources[id(tensor)] = tensor.data
            if not self._carrier.is_in_place:
                self._replace(tensor, tensor.new_empty(0, device=self._carrier.device))

    def _replace(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        self._undo.append(partial(setattr, tensor, "data", tensor.data))
        tensor.data = data


def _look_up(source: torch.Tensor, device: torch.device, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids.to(source.device), source).to(device)


def _is_within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes
