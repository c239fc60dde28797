"""How often is text found again when the store cannot hold it all? No model: index and eviction."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from kvboost.bench.questions.subjects import Row, Subject
from kvboost.codecs.raw import RawCodec
from kvboost.config import make_options
from kvboost.core import KVGeometry, MatchKind, PlaneGroup, ReusePlan, Span
from kvboost.engine.prefill import Terms, keep, look_up, space_of
from kvboost.metrics import Metrics
from kvboost.tiers.host import HostFrames
from kvboost.tiers.index import ChunkIndex
from kvboost.tiers.memory import MemoryTier
from kvboost.tiers.stack import TierStack
from kvboost.tiers.store import ChunkStore

PATTERNS = ("uniform", "zipf", "temporal")
CACHE_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
DOCUMENT_TOKENS = (128, 512)
DOCUMENTS_PER_PROMPT = 3
QUESTION_TOKENS = 24
VOCABULARY = 50_000

AGAIN = 0.8  # temporal: how often a document is one of the last used ones
RECENT = 12  # temporal: how many those are

GEOMETRY = KVGeometry(1, (PlaneGroup((0, 1), heads=1, head_dim=8),), "bfloat16", 2)
OPTIONS = make_options({"chunk_size": 128})


def hits(subject: Subject) -> Iterator[Row]:
    """A row for each pattern of traffic and size of the cache."""
    num_documents, num_requests = (40, 120) if subject.is_quick else (120, 480)
    texts = random_documents(num_documents, subject.seed)
    all_bytes = stored_bytes(texts)
    for pattern in PATTERNS:
        requests = draw(pattern, num_documents, num_requests, subject.seed)
        for share in CACHE_SHARES:
            budget_bytes = int(share * all_bytes)
            found, exact = replay(requests, texts, budget_bytes, subject.seed)
            yield {
                "pattern": pattern,
                "cache_share": share,
                "hit_rate": round(found, 4),
                "exact_hit_rate": round(exact, 4),
                "documents": num_documents,
                "requests": num_requests,
            }


class BlankSlots:
    """Rows of zeros: what is stored has a size, and nobody reads it."""

    def __init__(self, num_tokens: int, exact_stop: int) -> None:
        self.exact_stop = exact_stop
        group = GEOMETRY.groups[0]
        shape = (len(group.planes), group.heads, num_tokens, group.head_dim)
        self._rows = torch.zeros(shape, dtype=torch.bfloat16)

    def read(self, span: Span) -> list[torch.Tensor]:
        """The rows of a span."""
        return [self._rows[:, :, span.start : span.stop]]


def random_documents(num_documents: int, seed: int) -> list[list[int]]:
    """Texts that have nothing in common."""
    chance = random.Random(seed)
    sizes = (chance.randint(*DOCUMENT_TOKENS) for _ in range(num_documents))
    return [chance.choices(range(VOCABULARY), k=size) for size in sizes]


def draw(pattern: str, num_documents: int, num_requests: int, seed: int) -> list[list[int]]:
    """The documents of each request, by number; no document stands twice in one prompt."""
    chance = random.Random(f"{pattern} {seed}")
    weights = list(accumulate(1 / (1 + rank) for rank in range(num_documents)))
    recent: list[int] = []

    def one() -> int:
        if pattern == "zipf":
            return chance.choices(range(num_documents), cum_weights=weights)[0]
        if pattern == "temporal" and recent and chance.random() < AGAIN:
            return chance.choice(recent[-RECENT:])
        return chance.randrange(num_documents)

    requests = []
    for _ in range(num_requests):
        chosen: list[int] = []
        while len(chosen) < DOCUMENTS_PER_PROMPT:
            document = one()
            if document not in chosen:
                chosen.append(document)
        recent = [each for each in recent if each not in chosen] + chosen
        requests.append(chosen)
    return requests


def replay(
    requests: Sequence[Sequence[int]], texts: Sequence[list[int]], budget_bytes: int, seed: int
) -> tuple[float, float]:
    """Ask and store one prompt after the other; the first half only fills the store.

    Returns the shares of the documents' tokens in the second half that were found, and exactly.
    """
    store, chance = _store(budget_bytes), random.Random(seed)
    total = found = exact = 0
    for number, chosen in enumerate(requests):
        question = chance.choices(range(VOCABULARY), k=QUESTION_TOKENS)
        tokens = [token for document in chosen for token in texts[document]] + question
        plan = _ask(tokens, store)
        if 2 * number >= len(requests):
            num_in_documents = len(tokens) - QUESTION_TOKENS
            total += num_in_documents
            kinds = {match.span: match.kind for match in plan.before(num_in_documents).matches}
            found += sum(map(len, kinds))
            exact += sum(len(span) for span, kind in kinds.items() if kind is MatchKind.EXACT)
    return found / total, exact / total


def stored_bytes(texts: Sequence[list[int]]) -> int:
    """What all documents take in the store, each once."""
    store = _store(2**40)
    for text in texts:
        _keep(text, ReusePlan(len(text)), store)
    return store.tiers.memory.stats().size_bytes


def _store(budget_bytes: int) -> ChunkStore:
    metrics = Metrics()
    codec = RawCodec(GEOMETRY)
    tiers = TierStack(MemoryTier(budget_bytes), HostFrames(codec), metrics, deadline_s=1.0)
    return ChunkStore(ChunkIndex(), tiers, codec, metrics)


def _ask(tokens: list[int], store: ChunkStore) -> ReusePlan:
    """Look a prompt up, read what was found, and store the rest, as the engine does."""
    plan = look_up(tokens, _parts(store), Terms("auto"))
    store.tiers.get([match.key for match in plan.matches])
    _keep(tokens, plan, store)
    return plan


def _keep(tokens: list[int], plan: ReusePlan, store: ChunkStore) -> None:
    exact_stop = min((span.start for span in plan.moved), default=len(tokens))
    parts, slots = _parts(store), BlankSlots(len(tokens), exact_stop)
    prefilled: Any = SimpleNamespace(
        rows=slots, space=space_of("", parts), num_deletions=0, plan=plan
    )
    keep(prefilled, tokens, parts, tenant="")


def _parts(store: ChunkStore) -> Any:
    """What finding and storing ask of an engine."""
    return SimpleNamespace(
        options=OPTIONS,
        model=SimpleNamespace(fingerprint=b"hits", rotations={0: None}),
        boundaries=frozenset(),
        piece_tokens=None,
        store=store,
    )
