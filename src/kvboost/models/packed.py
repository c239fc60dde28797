"""One forward: tokens of one or of many sequences, whose K/V lies in block tables.

Linear layers see all tokens in one row. Attention runs per sequence on its own rows, and once for
all sequences that share rows. The mask that Transformers asks our mask function for carries the
sequences to our attention function, so that no model needs to know.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost.core import Span
from kvboost.models import cascade, spread
from kvboost.models.pool import KeyValue, Run
from kvboost.models.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvboost.core import KVGeometry

LEAST_SHARED = 128  # rows; below, attention in two parts costs more than it saves
SHARED_STEP = 32  # rows are attended to together in multiples of this
MOST_SMALL_ROWS = 256  # with more, attention to them dominates and nothing is gained
MOST_RUNS = 16  # with more, rows are gathered before attention

MaskOne = Callable[[int, int, "int | torch.Tensor"], "torch.Tensor | None"]
"""(queries, keys, offset of the queries) -> the mask of one sequence."""

AttendOne = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor
]
"""(query, key, value, mask) -> output [1, queries, heads, head_dim] of one sequence."""

RowObserver = Callable[[int, KeyValue, KeyValue], None]
"""Called with a layer, its fresh K and V, and its stored K and V of all visible rows."""


@dataclass(eq=False)
class Segment:
    """What one sequence has in a forward: tokens for the rows at `positions`."""

    rows: Rows
    tokens: Sequence[int]
    positions: Sequence[int]
    corrected: Iterable[Span] = ()  # moved text whose other rows are corrected by these
    observer: RowObserver | None = None  # sees each layer's fresh rows before they go in

    def __post_init__(self) -> None:
        rows, positions = self.rows, self.positions
        self._num_filled = rows.length
        self.start = self.stop = 0  # in the packed row
        self.num_before = 0  # rows at the start to which others of the forward attend as well
        self.is_appended = isinstance(positions, range) and positions.start == rows.length
        self.num_visible = max(rows.length, max(positions) + 1)
        self.scattered = None
        self._patches: list[spread.Patch] = []
        if not self.is_appended:
            self.scattered = torch.tensor(list(positions), device=rows.device)
            self._patches = spread.patches(self.corrected, positions, rows.pool.dtype, rows.device)
        rows.make_room(self.num_visible)

    def rewind(self) -> None:
        """Forget the rows of a step that failed; a second forward writes them again."""
        self.rows.length = self._num_filled

    @property
    def offset(self) -> int | torch.Tensor:
        """What to add to a query's index to get its position.

        Transformers adds this to arange(num_queries) when it builds any mask. A tensor of
        differences puts each scattered query at its own position, so that every kind of mask
        (causal, sliding, chunked) comes out right without knowing the model.
        """
        if self.scattered is None:
            return self.rows.length
        return self.scattered - torch.arange(len(self.scattered), device=self.scattered.device)

    @property
    def is_small(self) -> bool:
        """Whether it is one token of a sequence with few rows of its own."""
        num_own = self.rows.length - self.num_before
        is_short = self.is_appended and len(self.tokens) == 1 and num_own < MOST_SMALL_ROWS
        return is_short and not self.rows.is_private  # all are read from one pool

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write fresh rows of a layer."""
        rows, fresh = self.rows, (key, value)
        if self.observer is not None:
            self.observer(layer, fresh, self.whole(layer))
        if self.scattered is None:
            rows.put(layer, rows.length, fresh)
            return
        for patch in self._patches:
            stored = rows.whole(layer, patch.start, patch.stop)
            for old, new in zip(stored, fresh, strict=True):
                spread.apply(patch, old, new)
            if rows.num_runs > 1:
                rows.put(layer, patch.start, stored)
        rows.put_at(layer, self.scattered, fresh)

    def whole(self, layer: int) -> KeyValue:
        """K and V of all visible rows; a copy where they lie in several runs."""
        return self.rows.whole(layer, 0, self.num_visible)

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> cascade.Part:
        """Causal attention of appended tokens to all rows but the first `num_before`."""
        rows, first_own = self.rows, self.rows.length
        past = rows.layer(layer, self.num_before, first_own)
        if len(past) > MOST_RUNS:
            past = [rows.whole(layer, self.num_before, first_own)]
        own = rows.whole(layer, first_own, self.num_visible)
        return cascade.attend_appended(query, past, own, scale)

    def finish(self) -> None:
        """Count the rows that were written."""
        self.rows.length = self.num_visible


class SmallRows:
    """All small segments of a forward: their rows are written together."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments, self._pool = segments, segments[0].rows.pool
        ends = [segment.rows.length for segment in segments]
        places = [s.rows.places(end, end + 1) for s, end in zip(segments, ends, strict=True)]
        self._places = torch.cat(places)
        starts = [segment.start for segment in segments]
        self._columns = torch.tensor(starts, device=self._places.device)
        self._are_first = starts == list(range(len(starts)))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put each segment's new row where it belongs."""
        for plane, fresh in zip(self._pool.layers[layer], (key, value), strict=True):
            if self._are_first:
                plane.index_copy_(2, self._places, fresh[:, :, : len(self._segments)])
            else:
                plane.index_copy_(2, self._places, fresh.index_select(2, self._columns))


class ForwardLayer(CacheLayerMixin):
    """Hands each sequence's part of the fresh rows to its block table."""

    is_sliding = False  # rows are kept for the whole sequence; the mask applies the window
    is_croppable = True

    def __init__(self, cache: ForwardCache, index: int) -> None:
        super().__init__()
        # Weak: a cycle would keep the K/V of all sequences until a garbage collection.
        self._cache_ref, self._index = weakref.ref(cache), index
        self.is_initialized = True

    @property
    def _cache(self) -> ForwardCache:
        cache = self._cache_ref()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool exists from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Write the new rows; return all visible ones, or leave it to attention to find them."""
        cache = self._cache
        for segment in cache.others:
            place = slice(segment.start, segment.stop)
            segment.write(self._index, key_states[:, :, place], value_states[:, :, place])
        if cache.small is not None:
            cache.small.write(self._index, key_states, value_states)
        if cache.is_packed:
            return key_states, value_states
        return cache.segments[0].whole(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Visible rows and the first of them; of no meaning for several sequences."""
        cache = self._cache
        return query_length if cache.is_packed else cache.segments[0].num_visible, 0

    def get_seq_length(self) -> int:
        """Rows before the next appended token; of no meaning for several sequences."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """No limit: room is made as it is needed."""
        return -1


class ForwardCache(Cache):
    """The cache of one forward."""

    def __init__(
        self,
        geometry: KVGeometry,
        segments: Sequence[Segment],
        *,
        packs: bool,
        least_shared: int | None = None,
    ) -> None:
        """`packs`: attention may find rows by itself, which it does where it has to."""
        super().__init__(layers=[ForwardLayer(self, i) for i in range(geometry.num_layers)])
        self.joins = True  # whether every kind of mask lets attention be computed in parts
        self._least_shared = LEAST_SHARED if least_shared is None else least_shared
        self.begin(segments, packs=packs)

    def begin(self, segments: Sequence[Segment], *, packs: bool) -> None:
        """Take what the forward computes."""
        for segment in segments:
            segment.num_before = 0
        # Alone and in one run, a sequence has the kernels of `generate`, and so the same bits.
        self.is_packed = packs and (len(segments) > 1 or segments[0].rows.num_runs > 1)
        if self.is_packed:
            _find_shared(segments, self._least_shared)
        self.segments = sorted(segments, key=_order)
        start = 0
        for segment in self.segments:
            segment.start, segment.stop = start, start + len(segment.tokens)
            start = segment.stop
        small = [each for each in self.segments if self.is_packed and each.is_small]
        self.small = SmallRows(small) if small else None
        self.others = [each for each in self.segments if each not in small]

    def finish(self) -> None:
        """Count the rows that were written."""
        for segment in self.segments:
            segment.finish()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows before the next appended token; of no meaning for several sequences."""
        return 0 if self.is_packed else self.segments[0].rows.length

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Where queries are; of several sequences, a number that brings them to our mask."""
        if not self.is_packed:
            return self.segments[0].offset
        offset = torch.zeros((), dtype=torch.long, device=self.segments[0].rows.device)
        offset.kvboost_batch = self  # type: ignore[attr-defined]
        return offset


class GenerateCache(ForwardCache):
    """The cache of one sequence through all forwards of Transformers' `generate()`."""

    def __init__(
        self,
        geometry: KVGeometry,
        rows: Rows,
        tokens: Sequence[int],
        pending: Sequence[int] = (),
        corrected: Iterable[Span] = (),
        *,
        packs: bool,
    ) -> None:
        """The first forward also computes the `pending` rows before the last filled one."""
        Cache.__init__(self, layers=[ForwardLayer(self, i) for i in range(geometry.num_layers)])
        self._rows, self._packs = rows, packs
        self.pending = [position for position in pending if position < rows.length]
        self.pending_tokens = torch.tensor([tokens[position] for position in self.pending])
        self._corrected = corrected
        self.segments, self.small, self.is_packed, self.joins = [], None, False, True
        self._least_shared = LEAST_SHARED

    def next(self, positions: Sequence[int]) -> None:
        """Take what the next forward computes."""
        tokens, spans = positions, self._corrected  # their ids are the caller's matter
        self.pending, self._corrected = [], ()
        self.begin([Segment(self._rows, tokens, positions, spans)], packs=self._packs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows before the next appended token."""
        return self._rows.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows (Transformers counts them as a negative)."""
        self._rows.crop(self._rows.length - abs(tokens_to_remove))


class Together:
    """Sequences that attend at once: to what they share, if they do, and each to its own rows."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._first, self._one = segments[0].start, segments[0]
        small = [segment for segment in segments if segment.is_small]
        self._small = SmallAttention(small) if small else None
        self._others = segments[len(small) :]
        self._num_small = len(small)

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of these sequences [1, tokens, heads, head_dim]."""
        parts = []
        if self._small is not None:
            parts.append(self._small.attend(layer, query[:, :, : self._num_small], scale))
        for segment in self._others:
            part = query[:, :, segment.start - self._first : segment.stop - self._first]
            parts.append(segment.attend(layer, part, scale))
        output, total = parts[0]
        if len(parts) > 1:
            output = torch.cat([output.float() for output, _ in parts], dim=2)
            total = torch.cat([total for _, total in parts], dim=2)
        if self._one.num_before:
            views = self._one.rows.layer(layer, 0, self._one.num_before)
            shared = [cascade.attend(query, *each, scale) for each in views]
            output, _ = cascade.join([*shared, (output, total)])
        return output.to(query.dtype).transpose(1, 2)


class SmallAttention:
    """One token of each sequence on its own rows, in one kernel."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._pool, device = segments[0].rows.pool, segments[0].rows.device
        lengths = [segment.num_visible - segment.num_before for segment in segments]
        longest, dtype = max(lengths), self._pool.dtype
        ends = torch.tensor(lengths, device=device)[:, None]
        is_hidden = torch.arange(longest, device=device) >= ends
        places = [each.rows.places(each.num_before, each.num_before + longest) for each in segments]
        # Behind a mask, too, rows must be numbers; those after the last one may be anything.
        self._places = torch.stack(places).masked_fill_(is_hidden, self._pool.blank)
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
        self._mask = mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None, None]

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> cascade.Part:
        """Attention of a token each [1, heads, tokens, head_dim]."""
        key, value = self._pool.gather(layer, self._places)
        output, total = cascade.attend(query.transpose(0, 2), key, value, scale, mask=self._mask)
        return output.transpose(0, 2), total.transpose(0, 2)


class PackedMask:
    """The masks of all sequences, for the layers that have this kind of mask."""

    def __init__(self, cache: ForwardCache, mask_one: MaskOne, *, joins: bool) -> None:
        """`joins`: attention to several parts of the rows may be computed apart."""
        cache.joins &= joins
        self._runs: list[tuple[Together | None, list[Segment]]] = []
        self._masks: dict[int, torch.Tensor | None] = {}
        for _, group in groupby(cache.segments, key=_shared):
            segments = list(group)
            together = [each for each in segments if joins and each.scattered is None]
            if together:
                self._runs.append((Together(together), together))
            for segment in segments[len(together) :]:
                self._runs.append((None, [segment]))
                self._masks[id(segment)] = mask_one(
                    len(segment.tokens), segment.num_visible, segment.offset
                )

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


def run(model: PreTrainedModel, cache: ForwardCache, wanted: int | torch.Tensor) -> torch.Tensor:
    """Compute a forward; the logits [tokens, vocabulary] of the `wanted` last tokens, or places.

    A model that has no argument for that computes all of them.
    """
    tokens = [token for segment in cache.segments for token in segment.tokens]
    positions = [place for segment in cache.segments for place in segment.positions]
    has_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    logits: torch.Tensor = model(
        input_ids=torch.tensor([tokens], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        past_key_values=cache,
        use_cache=True,
        **({"logits_to_keep": wanted} if has_it else {}),
    ).logits[0]
    cache.finish()
    return logits


def run_last(model: PreTrainedModel, cache: ForwardCache) -> dict[Segment, torch.Tensor]:
    """Compute a forward; the logits [vocabulary] of each sequence's last token."""
    last = torch.tensor([segment.stop - 1 for segment in cache.segments], device=model.device)
    logits = run(model, cache, last)
    if len(logits) != len(last):
        logits = logits[last]
    return dict(zip(cache.segments, logits, strict=True))


def _find_shared(segments: Sequence[Segment], least_rows: int) -> None:
    """Have sequences that begin with the same rows attend to these together."""
    # Private rows have pools of their own, whose row numbers mean other rows.
    appended = [each for each in segments if each.scattered is None and not each.rows.is_private]
    counts = {each.rows.num_shared // SHARED_STEP * SHARED_STEP for each in appended}
    for count in sorted(count for count in counts if count >= least_rows):
        alike: dict[tuple[Run, ...], list[Segment]] = {}
        for segment in appended:
            if segment.rows.length >= count:
                runs = tuple(segment.rows.runs(Span(0, count)))
                alike.setdefault(runs, []).append(segment)
        for group in alike.values():
            for segment in group if len(group) > 1 else ():
                segment.num_before = count


def _shared(segment: Segment) -> tuple[Run, ...]:
    """The same for sequences that attend to shared rows together."""
    return tuple(segment.rows.runs(Span(0, segment.num_before)))


def _order(segment: Segment) -> tuple[tuple[Run, ...], bool, bool]:
    """Those that attend together stand together, first the small ones."""
    return _shared(segment), segment.scattered is not None, not segment.is_small
