"""Stand-ins for vLLM: requests, attention layers over blocks, and both sides without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fakes import words
from kvboost.build import build_repairs
from kvboost.config import Options
from kvboost.connectors.vllm.blocks import CODES, PagedCache
from kvboost.connectors.vllm.messages import Change, Facts, Load, Save, StepWork
from kvboost.connectors.vllm.rows import BlockRows
from kvboost.connectors.vllm.scheduler_side import SchedulerSide
from kvboost.connectors.vllm.worker_side import Agree, WorkerSide
from kvboost.core import Entry, Provenance, Span
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.tiers import anchors
from waiting import wait_until

MODEL = b"m3"  # its salt gives an anchor to each chunk that the tests move
CHUNK_SIZE = 32
BLOCK_SIZE = 16
HEADS, HEAD_DIM = 2, 4


@dataclass
class FakeRequest:
    """What is used of vLLM's `Request`; it has just come in."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    kv_transfer_params: Any = None
    lora_request: object | None = None
    mm_features: Sequence[object] = ()
    prompt_embeds: object | None = None
    skip_reading_prefix_cache: bool = False
    hash_block_size: int = BLOCK_SIZE
    num_prompt_tokens: int = field(init=False)
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        stops = range(self.hash_block_size, self.num_tokens + 1, self.hash_block_size)
        self.block_hashes = [sha256(repr(self.all_token_ids[:stop]).encode()).digest()
                             for stop in stops]  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def answer(self, tokens: Sequence[int]) -> None:
        """All but the last token of prompt and answer are computed."""
        self.all_token_ids = [*self.all_token_ids, *tokens]
        self.num_computed_tokens = self.num_tokens - 1


def changes_of(tokens: Sequence[int], tenant: str = "") -> list[Change]:
    """What a worker reports when it has stored a prompt."""
    space = namespace(MODEL, tenant, None)
    chunks = split(tokens, CHUNK_SIZE)
    places, hashes = anchors.pick(np.asarray(tokens, np.uint32), anchors.salt(space))
    words = list(zip(places.tolist(), hashes.tolist(), strict=True))
    changes = []
    for chunk, key in zip(chunks, derive(chunks, space), strict=True):
        start, stop = chunk.span.start, chunk.span.stop
        entry = Entry(chunk.tokens, Provenance.EXACT, key.prefix, None, key.parent, start, space)
        inside = tuple((place - start, word) for place, word in words if start <= place < stop)
        changes.append(Change(entry.key, entry, inside))
    return changes


PutRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def put_joined(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Into [blocks, heads, size, 2 * dim]."""
    size = cache.shape[2]
    cache[slots // size, :, slots % size] = torch.cat([key, value], dim=-1)


def put_apart(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Into [2, blocks, size, heads, dim]."""
    size = cache.shape[2]
    for kind, rows in enumerate((key, value)):
        cache[kind][slots // size, slots % size] = rows


def put_packed(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Into [blocks, heads, 2, size * dim], of which K is in groups [dim / 2, 16 tokens, 2]."""
    heads, dim = key.shape[1:]
    size = cache.shape[3] // dim
    blocks, offsets = slots // size, (slots % size)[:, None]
    dims = torch.arange(dim)[None]
    in_groups = offsets // 16 * 16 * dim + dims // 2 * 32 + offsets % 16 * 2 + dims % 2
    in_rows = offsets * dim + dims
    for kind, (rows, places) in enumerate(((key, in_groups), (value, in_rows))):
        which = (blocks[:, None, None], torch.arange(heads)[None, :, None], kind)
        cache[(*which, places[:, None])] = rows


ARRANGEMENTS: dict[str, tuple[Callable[[int, int], tuple[int, ...]], PutRows]] = {
    "joined": (lambda blocks, size: (blocks, HEADS, size, 2 * HEAD_DIM), put_joined),
    "apart": (lambda blocks, size: (2, blocks, size, HEADS, HEAD_DIM), put_apart),
    "packed": (lambda blocks, size: (blocks, HEADS, 2, size * HEAD_DIM), put_packed),
}
"""By name: the shape of a layer's tensor, and what writes into it."""


class FakeLayer:
    """An attention layer of vLLM, as far as its blocks go."""

    def __init__(
        self,
        kv_cache: torch.Tensor,
        put: PutRows,
        heads: int = HEADS,
        dim: int = HEAD_DIM,
        codes: str = "auto",
    ) -> None:
        self.kv_cache, self.num_kv_heads, self.head_size = kv_cache, heads, dim
        self.kv_cache_dtype = codes
        self._k_scale, self._v_scale = torch.tensor(0.3), torch.tensor([0.07])

        def update(_: FakeLayer, key: torch.Tensor, value: torch.Tensor, *at: torch.Tensor) -> None:
            if codes in CODES:
                key = (key.float() / self._k_scale).to(CODES[codes]).view(torch.uint8)
                value = (value.float() / self._v_scale).to(CODES[codes]).view(torch.uint8)
            put(key, value, *at)

        self.impl = SimpleNamespace(do_kv_cache_update=update)


def paged_cache(
    arrangement: str = "joined",
    num_layers: int = 2,
    num_blocks: int = 24,
    dtype: torch.dtype = torch.float32,
    codes: str = "auto",
) -> PagedCache:
    """Blocks without a model; of one byte a number if `codes` says so."""
    shape, put = ARRANGEMENTS[arrangement]
    kept = dtype if codes == "auto" else torch.uint8
    layers = {
        f"layers.{number}.attn": FakeLayer(
            torch.zeros(shape(num_blocks, BLOCK_SIZE), dtype=kept), put, codes=codes
        )
        for number in range(num_layers)
    }
    return PagedCache(layers, num_layers, num_blocks, BLOCK_SIZE, dtype)


OPTIONS = Options(reuse="auto", chunk_size=CHUNK_SIZE, max_cache_bytes=1 << 24)
BLOCK_IDS = list(range(100, 200))


def scheduler_side(
    *stored: Sequence[int],
    options: Options = OPTIONS,
    block_ids: Sequence[int] = BLOCK_IDS,
    hash_block_size: int = BLOCK_SIZE,
    refusal: str = "",
    move_refusal: str = "",
    must_prefetch: bool = False,
) -> SchedulerSide:
    """A scheduler's side whose workers have stored prompts; all requests have the same blocks."""
    side = SchedulerSide(options, build_repairs(options), lambda _: block_ids, hash_block_size)
    changes = tuple(change for tokens in stored for change in changes_of(tokens))
    side.learn([Facts(MODEL, refusal, move_refusal, must_prefetch, changes)])
    return side


def admit(side: SchedulerSide, request: FakeRequest, num_local: int = 0) -> tuple[int | None, bool]:
    """Take a request as vLLM's scheduler does, up to its first step."""
    side.add(request)
    count, is_beside = side.match(request, num_local)
    side.allocated(request, count or 0)
    return count, is_beside


def admitted(
    side: SchedulerSide, tokens: list[int], **fields: Any
) -> tuple[SchedulerSide, FakeRequest]:
    """A side with a request that it has taken."""
    request = FakeRequest("r", tokens, **fields)
    admit(side, request)
    return side, request


PREFIX = words(64, seed=1)
DOCUMENT = words(128, seed=2)
ELSEWHERE = words(40, seed=3) + DOCUMENT + words(24, seed=4)  # where the document was read before
MOVED_AT = len(PREFIX) + 20
MOVED_STOP = MOVED_AT + len(DOCUMENT)


def moved_prompt(seed: int = 5) -> list[int]:
    """An exact prefix, 20 tokens, the document and a question."""
    return PREFIX + words(20, seed) + DOCUMENT + words(30, seed + 1)


def knowing(**how: object) -> SchedulerSide:
    """A scheduler's side whose workers have stored the prefix and the document."""
    return scheduler_side(PREFIX, ELSEWHERE, **how)  # type: ignore[arg-type]


def all_saves(side: SchedulerSide) -> list[Save]:
    """Those of an idle step."""
    return side.step({}, {}, ()).saves


def whole_chunks(tokens: list[int]) -> list[int]:
    """What of a prompt is saved before its answer has ended."""
    return tokens[: len(tokens) // CHUNK_SIZE * CHUNK_SIZE]


class FakeSparse:
    """Records what it is asked to compute; returns the logits that it was given."""

    def __init__(self) -> None:
        self.forwards: list[tuple[list[int], list[int]]] = []
        self.spans: Sequence[Span] = ()
        self.layers: list[str] = []
        self.logits: list[torch.Tensor] = []
        self.error: Exception | None = None

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        block_ids: Sequence[int],
        correction: tuple[object, Sequence[Span]] | None = None,
        num_logits: int = 0,
    ) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.forwards.append((list(tokens), list(positions)))
        self.spans = correction[1] if correction else ()
        return self.logits.pop(0) if num_logits else torch.empty(0)

    def before_attention(self, layer_name: str) -> None:
        self.layers.append(layer_name)


HOME = list(range(12))[::-1]  # blocks of the request that is saved
AWAY = list(range(12, 24))[::-1]  # blocks of the request that is loaded


def worker_side(
    *, is_first: bool = True, options: Options = OPTIONS, agree: Agree = list
) -> WorkerSide:
    """A worker's side over blocks without a model."""
    repairs = build_repairs(options)
    worker = WorkerSide(options, repairs, paged_cache(), is_first=is_first, agree=agree)
    worker.name_model(MODEL)
    return worker


def fill(
    worker: WorkerSide, block_ids: Sequence[int], num_tokens: int, scale: float = 1.0
) -> torch.Tensor:
    """Write random rows as a model would; they are returned."""
    (group,) = worker.cache.geometry.groups
    shape = (len(group.planes), group.heads, num_tokens, group.head_dim)
    rows = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    BlockRows(worker.cache, block_ids).write(Span(0, num_tokens), [rows])
    return rows


def rows_of(worker: WorkerSide, block_ids: Sequence[int], span: Span) -> torch.Tensor:
    """What lies in blocks."""
    return BlockRows(worker.cache, block_ids).read(span)[0]


def do(worker: WorkerSide, work: StepWork) -> tuple[set[str], set[str]]:
    """Carry out a step to its end; whose blocks are saved, and loaded."""
    worker.begin_step(work)
    worker.end_step(work)
    wait_until(lambda: worker._num_pending == 0)
    return worker.take_finished(work)


def saved(
    worker: WorkerSide, tokens: list[int], tenant: str = "", scale: float = 1.0
) -> torch.Tensor:
    """Store a prompt; its rows."""
    rows = fill(worker, HOME, len(tokens), scale)
    save = Save("saved", tokens, tenant, HOME, is_last=True)
    assert do(worker, StepWork(saves=[save])) == ({"saved"}, set())
    return rows


def load_of(tokens: list[int], stored: Sequence[int], start: int = 0) -> Load:
    """What the scheduler's side asks for, where a prompt is stored."""
    side = scheduler_side(stored, block_ids=AWAY)
    admit(side, FakeRequest("loaded", tokens), start)
    (load,) = side.step({}, {}, ()).loads
    return load
