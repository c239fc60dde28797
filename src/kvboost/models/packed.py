"""Tokens of many requests in one row of a forward: linear layers see all of them at once.

Attention runs per request on its own rows, and once for all requests that share rows. The mask
that Transformers asks our mask function for carries the requests to our attention function, so
that no model needs to know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost.models import cascade
from kvboost.models.rows import Rows, SharedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvboost.core import KVGeometry

SHORT_ROWS = 256  # up to here requests' own rows are copied together

MaskOne = Callable[[int, int, "int | torch.Tensor"], "torch.Tensor | None"]
"""(queries, keys, offset of the queries) -> the mask of one sequence."""

AttendOne = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor
]
"""(query, key, value, mask) -> output [1, queries, heads, head_dim] of one sequence."""


@dataclass(eq=False)
class Segment:
    """What one request has in a step: tokens for the rows at `positions`."""

    rows: Rows
    tokens: Sequence[int]
    positions: Sequence[int]
    start: int = 0  # in the packed row
    stop: int = 0
    kv: tuple[torch.Tensor, torch.Tensor] = field(init=False)  # own rows, of the layer that runs

    @property
    def is_appended(self) -> bool:
        """Whether its tokens follow the rows that are there."""
        positions = self.positions
        return isinstance(positions, range) and positions.start == self.rows.length


class PackedLayer(CacheLayerMixin):
    """Hands each request's part of the fresh rows to the request's own layer."""

    is_sliding = False

    def __init__(self, cache: PackedCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: requests bring their buffers."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows where they belong; attention finds them through its mask."""
        index = self._index
        for segment in self._cache.segments:
            place = slice(segment.start, segment.stop)
            segment.kv = segment.rows.own.layers[index].update(
                key_states[:, :, place], value_states[:, :, place]
            )
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of no meaning for several sequences."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Of no meaning for several sequences: positions are given."""
        return 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class PackedCache(Cache):
    """The cache of one packed forward."""

    def __init__(self, segments: Sequence[Segment], num_layers: int) -> None:
        super().__init__(layers=[PackedLayer(self, index) for index in range(num_layers)])
        # Who shares rows stands together, and among them those with few rows of their own.
        self.segments = sorted(segments, key=lambda s: (id(s.rows.shared), not _is_short(s)))
        start = 0
        for segment in self.segments:
            segment.start, segment.stop = start, start + len(segment.tokens)
            start = segment.stop
            if not segment.is_appended:
                shift = segment.rows.num_shared
                segment.rows.own.scatter([place - shift for place in segment.positions])

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:
        """A number that brings this cache to our mask function."""
        offset = torch.zeros((), dtype=torch.long, device=self.segments[0].rows.own.device)
        offset.kvboost_batch = self  # type: ignore[attr-defined]
        return offset


class SharedRun:
    """Requests that begin alike: they attend once to what they share, then each to its own."""

    def __init__(self, shared: SharedRows, segments: Sequence[Segment]) -> None:
        self._shared, self._first = shared, segments[0].start
        self._pieces: list[tuple[list[Segment], ShortRows | None]] = []
        for is_short, run in groupby(segments, key=_is_short):
            members = list(run)
            if is_short:
                self._pieces.append((members, ShortRows(members)))
            else:
                self._pieces += [([each], None) for each in members]

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of these requests [1, tokens, heads, head_dim]."""
        outputs, totals = [], []
        for members, short in self._pieces:
            part = query[:, :, members[0].start - self._first : members[-1].stop - self._first]
            if short is None:
                output, total = cascade.attend_appended(part, *members[0].kv, scale)
            else:
                output, total = short.attend(layer, part, scale)
            outputs.append(output.float())
            totals.append(total)
        own = (torch.cat(outputs, dim=2), torch.cat(totals, dim=2))
        joined, _ = cascade.join(cascade.attend(query, *self._shared.layer(layer), scale), own)
        return joined.to(query.dtype).transpose(1, 2)


class ShortRows:
    """Requests with one token on few own rows: a copy is cheaper than a kernel for each."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        owns = [segment.rows.own for segment in segments]
        lengths = torch.tensor([own.length + 1 for own in owns])
        longest = int(lengths.max())
        self._stacked = owns[0].stacked(owns, longest)
        is_hidden = torch.arange(longest) >= lengths[:, None]
        blank = torch.zeros(is_hidden.shape, dtype=owns[0].dtype)
        lowest = torch.finfo(owns[0].dtype).min
        self._mask = blank.masked_fill_(is_hidden, lowest)[:, None, None]

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> cascade.Part:
        """Attention of each to its own rows."""
        key, value = self._stacked(layer)
        output, total = cascade.attend(query.transpose(0, 2), key, value, scale, mask=self._mask)
        return output.transpose(0, 2), total.transpose(0, 2)


class PackedMask:
    """The masks of all requests, for the layers that have this kind of mask."""

    def __init__(self, cache: PackedCache, mask_one: MaskOne, *, joins: bool) -> None:
        """`joins`: attention to shared and own rows may be computed apart."""
        self._runs: list[tuple[SharedRun | None, list[Segment]]] = []
        self._masks: dict[int, torch.Tensor | None] = {}
        for _, group in groupby(cache.segments, key=lambda each: id(each.rows.shared)):
            segments = list(group)
            shared = segments[0].rows.shared
            if shared is not None and joins and all(s.rows.own.scattered is None for s in segments):
                self._runs.append((SharedRun(shared, segments), segments))
                continue
            self._runs += [(None, [segment]) for segment in segments]
            for segment in segments:
                own, before = segment.rows.own, segment.rows.num_shared
                num_queries = len(segment.tokens)
                num_keys = before + own.visible_after(num_queries)
                offset = before + own.get_query_offset()
                self._masks[id(segment)] = mask_one(num_queries, num_keys, offset)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, attend_one: AttendOne
    ) -> torch.Tensor:
        """Attention of the packed row [1, tokens, heads, head_dim]."""
        outputs = []
        for run, segments in self._runs:
            part = query[:, :, segments[0].start : segments[-1].stop]
            if run is not None:
                outputs.append(run.attend(layer, part, scale))
            else:
                key, value = _whole(segments[0], layer)
                outputs.append(attend_one(part, key, value, self._masks[id(segments[0])]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def run_packed(
    model: PreTrainedModel, geometry: KVGeometry, segments: Sequence[Segment]
) -> dict[Segment, torch.Tensor]:
    """Run tokens of several sequences at once; the logits [vocabulary] of each one's last."""
    cache = PackedCache(segments, geometry.num_layers)
    tokens = [token for segment in cache.segments for token in segment.tokens]
    positions = [place for segment in cache.segments for place in segment.positions]
    last = torch.tensor([segment.stop - 1 for segment in cache.segments], device=model.device)
    logits = model(
        input_ids=torch.tensor([tokens], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        past_key_values=cache,
        use_cache=True,
        **keep_logits(model, last),
    ).logits[0]
    if len(logits) != len(last):  # a model that computes all
        logits = logits[last]
    return dict(zip(cache.segments, logits, strict=True))


def keep_logits(model: PreTrainedModel, wanted: int | torch.Tensor) -> dict[str, Any]:
    """The argument that limits logits to the last few tokens, or to those at some places.

    Empty if the model has no such argument and computes all of them.
    """
    has_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": wanted} if has_it else {}


def _whole(segment: Segment, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a layer in one tensor."""
    key, value = segment.kv
    if segment.rows.shared is None:
        return key, value
    first_key, first_value = segment.rows.shared.layer(layer)
    return torch.cat([first_key, key], dim=2), torch.cat([first_value, value], dim=2)


def _is_short(segment: Segment) -> bool:
    own = segment.rows.own
    return segment.rows.shared is not None and len(segment.tokens) == 1 and own.length < SHORT_ROWS
