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

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost.core import Span
from kvboost.models import cascade, spread
from kvboost.models.cascade import Together
from kvboost.models.pool import KeyValue, Run
from kvboost.models.rows import Past, Rows
from kvboost.models.upload import PerDevice, upload
from kvboost.models.varlen import Varlen, can_take

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvboost.core import KVGeometry

LEAST_SHARED = 128  # rows; below, attention in two parts costs more than it saves
SHARED_STEP = 32  # rows are attended to together in multiples of this
MOST_SMALL_ROWS = 256  # with more, attention to them dominates and nothing is gained

HOST = torch.device("cpu")

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
    """One sequence's part of a forward: tokens for the rows at `positions`."""

    rows: Rows
    tokens: Sequence[int]
    positions: Sequence[int]
    corrected: Iterable[Span] = ()  # moved text, whose rows between these are corrected
    observer: RowObserver | None = None  # sees each layer's fresh rows before they go in

    def __post_init__(self) -> None:
        rows, positions = self.rows, self.positions
        self._num_filled = rows.length
        self.start = self.stop = 0  # in the packed row
        self.num_before = 0  # rows at the start to which others of the forward attend as well
        self.is_appended = isinstance(positions, range) and positions.start == rows.length
        self.num_visible = max(positions) + 1
        self.scattered = None
        self._past: Past | None = None
        self._patches: list[spread.Patch] = []
        self._padded: list[spread.Padded] = []
        rows.make_room(self.num_visible)
        if not self.is_appended:
            slot_mapping = rows.slot_mapping(0, self.num_visible)
            own = slot_mapping[np.asarray(positions)]
            self.scattered, at = upload(rows.device, list(positions), own)
            self._slot_mapping = PerDevice(rows.device, at)
            self._patches = spread.patches(self.corrected, positions, rows.pool.dtype, HOST)
            if rows.device.type != "cpu":
                self._padded = spread.padded(self._patches, slot_mapping, rows.pool)

    def rewind(self) -> None:
        """Forget the rows of a step that failed; a second forward writes them again."""
        self.rows.length, self._past = self._num_filled, None

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
    def is_plain(self) -> bool:
        """Whether its rows are appended to filled ones, in the common pool."""
        return self.is_appended and self.observer is None and not self.rows.is_private

    @property
    def is_small(self) -> bool:
        """Whether it is one token of a sequence with few rows of its own."""
        num_own = self.rows.length - self.num_before
        return self.is_plain and len(self.tokens) == 1 and num_own < MOST_SMALL_ROWS

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write fresh rows of a layer."""
        rows, fresh = self.rows, (key, value)
        if self.observer is not None:
            self.observer(layer, fresh, self.whole(layer))
        if self.scattered is None:
            rows.put(layer, rows.length, fresh)
            return
        for group in self._padded:
            group.apply(layer, fresh)
        for patch in self._patches if not self._padded else ():
            stored = rows.whole(layer, patch.start, patch.stop)
            for old, new in zip(stored, fresh, strict=True):
                spread.apply(patch, old, new)
            if rows.num_runs > 1:
                rows.put(layer, patch.start, stored)
        (slot_mapping,) = self._slot_mapping.on(key.device)
        rows.pool.put(layer, slot_mapping, fresh)

    def whole(self, layer: int) -> KeyValue:
        """K and V of all visible rows; a copy where they lie in several runs."""
        return self.rows.whole(layer, 0, self.num_visible)

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> cascade.Part:
        """Causal attention of appended tokens to all rows but the first `num_before`."""
        rows, is_one = self.rows, len(self.tokens) == 1  # one token attends to its own row, too
        if self._past is None:
            self._past = Past(rows, self.num_before, self.num_visible if is_one else rows.length)
        past = self._past.layer(layer)
        if is_one:
            return cascade.join([cascade.attend(query, *each, scale) for each in past])
        own = rows.whole(layer, rows.length, self.num_visible)
        return cascade.attend_appended(query, past, own, scale)

    def finish(self) -> None:
        """Count the rows that were written."""
        self.rows.length = max(self._num_filled, self.num_visible)


class AppendedRows:
    """Segments whose fresh rows are written together, each after its last one."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._pool = segments[0].rows.pool
        mappings = [each.rows.slot_mapping(each.rows.length, each.num_visible) for each in segments]
        columns = [np.arange(each.start, each.stop) for each in segments]
        together = np.concatenate(columns)
        device = self._pool.device
        self._indices = PerDevice(device, *upload(device, np.concatenate(mappings), together))
        self._num_rows = len(together)
        self._are_first = bool((together == np.arange(len(together))).all())

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the fresh rows."""
        slot_mapping, columns = self._indices.on(key.device)
        if self._are_first:
            fresh = key[:, :, : self._num_rows], value[:, :, : self._num_rows]
        else:
            fresh = key.index_select(2, columns), value.index_select(2, columns)
        self._pool.put(layer, slot_mapping, fresh)


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
        if cache.appended is not None:
            cache.appended.write(self._index, key_states, value_states)
        if cache.is_packed:
            return key_states, value_states
        return cache.segments[0].whole(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Visible rows and the first of them; meaningless for several sequences."""
        cache = self._cache
        return query_length if cache.is_packed else cache.segments[0].num_visible, 0

    def get_seq_length(self) -> int:
        """Rows before the next appended token; meaningless for several sequences."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """No limit: blocks are taken as they are needed."""
        return -1


class ForwardCache(Cache):
    """The cache of one forward."""

    def __init__(
        self,
        geometry: KVGeometry,
        segments: Sequence[Segment] = (),
        *,
        packs: bool,
        may_join: bool = True,
        least_shared: int = LEAST_SHARED,
    ) -> None:
        """`packs`: attention may find rows by itself, which it does where it has to.

        `may_join`: it may be computed for several sequences, or runs of rows, and joined.
        """
        super().__init__(layers=[ForwardLayer(self, i) for i in range(geometry.num_layers)])
        self.may_join = may_join
        self.joins = True  # whether every kind of mask lets attention be computed in parts
        self._packs, self._least_shared = packs, least_shared
        self.segments: list[Segment] = []
        self.appended: AppendedRows | None = None
        self.is_packed = False
        if segments:
            self.begin(segments)

    def begin(self, segments: Sequence[Segment]) -> None:
        """Set the segments that the forward computes."""
        for segment in segments:
            segment.num_before = 0
        # Alone and in one run, a sequence has the kernels of `generate`, and so the same bits.
        self.is_packed = self._packs and (len(segments) > 1 or segments[0].rows.num_runs > 1)
        on_cpu = segments[0].rows.device.type == "cpu"
        if self.is_packed and on_cpu:
            _find_shared(segments, self._least_shared)
        self.segments = sorted(segments, key=_order)
        start = 0
        for segment in self.segments:
            segment.start, segment.stop = start, start + len(segment.tokens)
            start = segment.stop
        together = [each for each in self.segments if each.is_small or not on_cpu]
        together = [each for each in together if self.is_packed and each.is_plain]
        self.appended = AppendedRows(together) if together else None
        self.others = [each for each in self.segments if each not in together]

    def finish(self) -> None:
        """Count the rows that were written."""
        for segment in self.segments:
            segment.finish()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows before the next appended token; meaningless for several sequences."""
        return 0 if self.is_packed else self.segments[0].rows.length

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Offset of the queries; for several sequences, a tensor that carries these to our mask."""
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
        may_join: bool = True,
    ) -> None:
        """The first forward also computes the `pending` rows before the last filled one."""
        super().__init__(geometry, packs=packs, may_join=may_join)
        self._rows = rows
        self.pending = [position for position in pending if position < rows.length]
        self.pending_tokens = torch.tensor([tokens[position] for position in self.pending])
        self._corrected = corrected

    def next(self, positions: Sequence[int]) -> None:
        """Set the positions that the next forward computes."""
        tokens, spans = positions, self._corrected  # their ids are the caller's matter
        self.pending, self._corrected = [], ()
        self.begin([Segment(self._rows, tokens, positions, spans)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows before the next appended token."""
        return self._rows.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows (Transformers counts them as a negative)."""
        self._rows.crop(self._rows.length - abs(tokens_to_remove))


class PackedMask:
    """The masks of all sequences, for the layers that have this kind of mask."""

    def __init__(
        self,
        cache: ForwardCache,
        mask_one: MaskOne,
        *,
        joins: bool,
        window: int | None = None,
    ) -> None:
        """`joins`: attention to parts of the rows may be computed separately and joined."""
        joins = joins and cache.may_join
        cache.joins &= joins
        self._runs: list[tuple[Together | Varlen | None, list[Segment]]] = []
        self._masks: dict[int, PerDevice | None] = {}
        pool = cache.segments[0].rows.pool

        def kind(segment: Segment) -> object:
            """Segments of equal kind attend together: on CPUs, those that share rows."""
            if not joins:
                return id(segment)
            if pool.device.type == "cpu":
                return _shared(segment), segment.scattered is None
            takes_part = can_take(segment, pool, window)
            return ("varlen", len(segment.tokens) == 1) if takes_part else id(segment)

        for which, group in groupby(cache.segments, key=kind):
            segments = list(group)
            if isinstance(which, tuple) and which[0] == "varlen":
                self._runs.append((Varlen(segments, window), segments))
                continue
            together = joins and pool.device.type == "cpu" and segments[0].scattered is None
            if together:
                self._runs.append((Together(segments), segments))
                continue
            for segment in segments:
                self._runs.append((None, [segment]))
                mask = mask_one(len(segment.tokens), segment.num_visible, segment.offset)
                self._masks[id(segment)] = mask if mask is None else PerDevice(pool.device, mask)

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
                masks = self._masks[id(segments[0])]
                (mask,) = (None,) if masks is None else masks.on(query.device)
                outputs.append(attend_one(part, key, value, mask))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def run(model: PreTrainedModel, cache: ForwardCache, wanted: int | Sequence[int]) -> torch.Tensor:
    """Compute a forward; the logits [tokens, vocabulary] of the `wanted` last tokens, or indices.

    A model that has no argument for that computes all of them.
    """
    tokens = [token for segment in cache.segments for token in segment.tokens]
    positions = [position for segment in cache.segments for position in segment.positions]
    last = [wanted] if isinstance(wanted, int) else wanted
    ids, position_ids, which = upload(model.device, tokens, positions, last)
    has_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    # On several devices a tensor would be sent to the first, and the hidden states are on the last.
    is_split = len(set(cache.segments[0].rows.pool.devices)) > 1
    keep = wanted if isinstance(wanted, int) or is_split else which
    logits: torch.Tensor = model(
        input_ids=ids[None],
        position_ids=position_ids[None],
        past_key_values=cache,
        use_cache=True,
        **({"logits_to_keep": keep} if has_it else {}),
    ).logits[0]
    cache.finish()
    if isinstance(wanted, int) or len(logits) == len(which):
        return logits
    return logits[which]


def run_last(model: PreTrainedModel, cache: ForwardCache) -> dict[Segment, torch.Tensor]:
    """Compute a forward; the logits [vocabulary] of each sequence's last token."""
    logits = run(model, cache, [segment.stop - 1 for segment in cache.segments])
    return dict(zip(cache.segments, logits, strict=True))


def _find_shared(segments: Sequence[Segment], least_rows: int) -> None:
    """Have sequences that begin with the same rows attend to these together."""
    # Private rows are in other pools, where the same row numbers mean other rows.
    appended = [each for each in segments if each.scattered is None and not each.rows.is_private]
    counts = {each.rows.num_shared // SHARED_STEP * SHARED_STEP for each in appended}
    for count in sorted(count for count in counts if count >= least_rows):
        by_runs: dict[tuple[Run, ...], list[Segment]] = {}
        for segment in appended:
            if segment.rows.length >= count:
                runs = tuple(segment.rows.runs(Span(0, count)))
                by_runs.setdefault(runs, []).append(segment)
        for group in by_runs.values():
            for segment in group if len(group) > 1 else ():
                segment.num_before = count


def _shared(segment: Segment) -> tuple[Run, ...]:
    """The shared rows that a sequence attends to together with others."""
    return tuple(segment.rows.runs(Span(0, segment.num_before)))


def _order(segment: Segment) -> tuple[tuple[Run, ...], bool, bool, bool]:
    """Sort key: sequences that attend together are neighbours, small ones first."""
    is_prompt = len(segment.tokens) > 1
    return _shared(segment), segment.scattered is not None, not segment.is_small, is_prompt
