"""Tokens of many requests in one row of a forward: linear layers see all of them at once.

Attention runs per request on its own rows, and once for all requests that share rows. The mask
that Transformers asks our mask function for carries the requests to our attention function, so
that no model needs to know.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost.models import cascade
from kvboost.models.paged import PagedCache
from kvboost.models.rows import Rows, SharedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvboost.core import KVGeometry

MOST_SMALL_ROWS = 256  # with more, attention to them dominates and nothing is gained

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
    num_visible: int = 0  # own rows that it sees

    def __post_init__(self) -> None:
        self._before = self.rows.own.length, self.rows.own.patches

    def rewind(self) -> None:
        """Bring its rows back to where they were before a forward that failed."""
        own = self.rows.own
        own.length, own.patches = self._before
        own.scattered = None

    @property
    def is_appended(self) -> bool:
        """Whether its tokens follow the rows that are there."""
        positions = self.positions
        return isinstance(positions, range) and positions.start == self.rows.length

    @property
    def is_small(self) -> bool:
        """Whether it is one token of a request with few own rows, in a pool of blocks."""
        own = self.rows.own
        is_few = isinstance(own, PagedCache) and own.length < MOST_SMALL_ROWS
        return is_few and len(self.tokens) == 1 and self.is_appended

    def own(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of its own rows."""
        return self.rows.own.layer_rows(layer, self.num_visible)

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all its rows; a copy if some are shared."""
        if self.rows.shared is None:
            return self.own(layer)
        pairs = zip(self.rows.shared.layer(layer), self.own(layer), strict=True)
        key, value = (torch.cat(pair, dim=2) for pair in pairs)
        return key, value


class SmallRows:
    """All small segments of a step: their rows are written together."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        owns = _paged(segments)
        self._put = owns[0].pool.writer(owns)
        starts = [segment.start for segment in segments]
        self._columns = torch.tensor(starts, device=owns[0].device)
        self._are_first = starts == list(range(len(starts)))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put each segment's new row where it belongs."""
        if self._are_first:
            count = len(self.segments)
            self._put(layer, (key[:, :, :count], value[:, :, :count]))
        else:
            columns = self._columns
            self._put(layer, (key.index_select(2, columns), value.index_select(2, columns)))

    def finish(self) -> None:
        """Count the rows that were written."""
        for segment in self.segments:
            segment.rows.own.length += 1


class PackedLayer(CacheLayerMixin):
    """Hands each request's part of the fresh rows to the request's own layer."""

    is_sliding = False

    def __init__(self, cache: PackedCache, index: int) -> None:
        super().__init__()
        # Weak: a cycle would keep the K/V of all requests until a garbage collection.
        self._cache, self._index = weakref.ref(cache), index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: requests bring their buffers."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows where they belong; attention finds them through its mask."""
        cache = self._cache()
        assert cache is not None
        for segment in cache.others:
            place = slice(segment.start, segment.stop)
            segment.rows.own.layers[self._index].write(
                key_states[:, :, place], value_states[:, :, place]
            )
        if cache.small is not None:
            cache.small.write(self._index, key_states, value_states)
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
        for segment in segments:
            own, shift = segment.rows.own, segment.rows.num_shared
            if not segment.is_appended:
                own.scatter([place - shift for place in segment.positions])
            segment.num_visible = own.visible_after(len(segment.tokens))
            own.make_room(segment.num_visible)
        # Who shares rows stands together; those that attend together first, first the small ones.
        self.segments = sorted(segments, key=_order)
        start = 0
        for segment in self.segments:
            segment.start, segment.stop = start, start + len(segment.tokens)
            start = segment.stop
        small = [segment for segment in self.segments if segment.is_small]
        self.small = SmallRows(small) if small else None
        self.others = [segment for segment in self.segments if not segment.is_small]

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:
        """A number that brings this cache to our mask function."""
        offset = torch.zeros((), dtype=torch.long, device=self.segments[0].rows.own.device)
        offset.kvboost_batch = self  # type: ignore[attr-defined]
        return offset


class Together:
    """Requests that attend at once: to what they share, if they do, and each to its own rows."""

    def __init__(self, shared: SharedRows | None, segments: Sequence[Segment]) -> None:
        self._shared, self._first = shared, segments[0].start
        small = [segment for segment in segments if segment.is_small]
        self._small = SmallAttention(small) if small else None
        self._others = segments[len(small) :]
        self._num_small = len(small)

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of these requests [1, tokens, heads, head_dim]."""
        parts = []
        if self._small is not None:
            parts.append(self._small.attend(layer, query[:, :, : self._num_small], scale))
        for segment in self._others:
            part = query[:, :, segment.start - self._first : segment.stop - self._first]
            parts.append(cascade.attend_appended(part, *segment.own(layer), scale))
        output, total = parts[0]
        if len(parts) > 1:
            output = torch.cat([output.float() for output, _ in parts], dim=2)
            total = torch.cat([total for _, total in parts], dim=2)
        if self._shared is not None:
            shared = cascade.attend(query, *self._shared.layer(layer), scale)
            output = cascade.join(shared, (output, total))
        return output.to(query.dtype).transpose(1, 2)


class SmallAttention:
    """One token of each request on its own rows, in one kernel."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        owns = _paged(segments)
        lengths = [segment.num_visible for segment in segments]
        self._read = owns[0].pool.reader(owns, max(lengths))
        device, dtype = owns[0].device, owns[0].dtype
        ends = torch.tensor(lengths, device=device)[:, None]
        is_hidden = torch.arange(max(lengths), device=device) >= ends
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
        self._mask = mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None, None]

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> cascade.Part:
        """Attention of a token each [1, heads, tokens, head_dim]."""
        key, value = self._read(layer)
        output, total = cascade.attend(query.transpose(0, 2), key, value, scale, mask=self._mask)
        return output.transpose(0, 2), total.transpose(0, 2)


class PackedMask:
    """The masks of all requests, for the layers that have this kind of mask."""

    def __init__(self, cache: PackedCache, mask_one: MaskOne, *, joins: bool) -> None:
        """`joins`: attention to shared and own rows may be computed apart."""
        self._runs: list[tuple[Together | None, list[Segment]]] = []
        self._masks: dict[int, torch.Tensor | None] = {}
        for _, group in groupby(cache.segments, key=lambda each: id(each.rows.shared)):
            segments = list(group)
            shared, together = segments[0].rows.shared, []
            # Who is alone and shares nothing has the kernels of `generate`, and so the same bits.
            if joins and (shared is not None or len(cache.segments) > 1):
                together = [each for each in segments if each.rows.own.scattered is None]
            if together:
                self._runs.append((Together(shared, together), together))
            for segment in segments[len(together) :]:
                self._runs.append((None, [segment]))
                own, before = segment.rows.own, segment.rows.num_shared
                num_keys = before + segment.num_visible
                offset = before + own.get_query_offset()
                self._masks[id(segment)] = mask_one(len(segment.tokens), num_keys, offset)

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
                key, value = segments[0].whole(layer)
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
    if cache.small is not None:
        cache.small.finish()
    if len(logits) != len(last):  # a model that computes all
        logits = logits[last]
    return dict(zip(cache.segments, logits, strict=True))


def keep_logits(model: PreTrainedModel, wanted: int | torch.Tensor) -> dict[str, Any]:
    """The argument that limits logits to the last few tokens, or to those at some places.

    Empty if the model has no such argument and computes all of them.
    """
    has_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": wanted} if has_it else {}


def _order(segment: Segment) -> tuple[int, bool, bool]:
    is_scattered = segment.rows.own.scattered is not None
    return id(segment.rows.shared), is_scattered, not segment.is_small


def _paged(segments: Sequence[Segment]) -> list[PagedCache]:
    return cast("list[PagedCache]", [segment.rows.own for segment in segments])
