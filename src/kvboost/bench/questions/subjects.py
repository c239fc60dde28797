"""What is asked: our engine, the bare model on the same weights, and how the two are compared."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from kvboost.bench.clock import now
from kvboost.bench.texts import reference_pages
from kvboost.build import Parts, build
from kvboost.config import MIB, make_options
from kvboost.core import MatchKind
from kvboost.engine.batch.front import BatchFront
from kvboost.engine.prefill import space_of
from kvboost.engine.request import Request, check_arguments
from kvboost.engine.results import GenerationResult
from kvboost.engine.worker import CallerThread
from kvboost.models.hf import HFModel
from kvboost.models.load import boundary_tokens
from kvboost.policy.cost import CostModel

NUM_NEW = 4
NUM_DOCUMENTS = 4
QUESTION_TOKENS = 16
LENGTHS = (256, 512, 1024, 2048)
QUICK_LENGTHS = (256, 512)
NO_TOKEN = -1  # as the end of sequence: every answer has its full length
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Row = dict[str, Any]
N = TypeVar("N")


@dataclass(frozen=True)
class BareAnswer:
    """What Transformers' generate() said, and when."""

    ttft_ms: float
    total_ms: float
    tokens: list[int]


@dataclass(frozen=True)
class Pair:
    """One prompt, answered by ours and by the bare model in the same round."""

    ours_ms: float
    bare_ms: float
    ours_total_ms: float
    bare_total_ms: float
    top1: float
    cached_share: float  # of the prompt: not computed
    found_share: float  # of the prompt: taken from the store, repaired or not
    load_ms: float
    store_ms: float


@dataclass(frozen=True)
class Session:
    """Our engine with a store of its own, empty at first."""

    parts: Parts
    tokenizer: Any

    def ask(self, tokens: list[int], num_new: int = NUM_NEW) -> tuple[GenerationResult, float]:
        """The answer, and the milliseconds that storing its K/V took after it."""
        device = self.parts.model.model.device
        request = Request(
            tokens=tokens,
            reuse=self.parts.options.reuse,
            tenant="",
            adapter=self.parts.model.adapter,
            arguments=check_arguments({"eos_token_id": NO_TOKEN}, num_new, self.parts.model),
            started_at=now(device),
        )
        result = BatchFront(self.parts, self.tokenizer, CallerThread()).run(request)
        return result, 1e3 * (now(device) - request.started_at) - result.total_ms

    def stored_bytes_per_token(self) -> float:
        """Bytes of memory for each token that is stored now."""
        store = self.parts.store
        entries = store.index.entries(space_of("", self.parts), len(store.index))
        num_tokens = sum(entry.num_tokens for entry in entries)
        return store.tiers.memory.stats().size_bytes / max(1, num_tokens)


class TokenClock(StoppingCriteria):  # type: ignore[misc]
    """Notes when each token of a bare generate() was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by Transformers after each token; stops nothing."""
        self.times.append(now(input_ids.device))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Subject:
    """One model in one dtype, and how much of it to ask. Models are loaded when first needed."""

    model: str
    dtype: str = "bf16"
    rounds: int = 3
    seed: int = 0
    is_quick: bool = False

    @property
    def num_tokens(self) -> int:
        """Length of a prompt where the question is not about length."""
        return 512 if self.is_quick else 1024

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of prompts where the question is about length, the longest last."""
        return QUICK_LENGTHS if self.is_quick else LENGTHS

    @property
    def seeds(self) -> range:
        """A seed for each round."""
        first = 1000 * self.seed
        return range(first, first + (1 if self.is_quick else self.rounds))

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own."""
        return AutoTokenizer.from_pretrained(self.model)

    @cached_property
    def bare(self) -> Any:
        """A copy of the model that ours does not touch."""
        return self._load()

    @cached_property
    def hosted(self) -> HFModel:
        """The copy that runs with our attention."""
        return HFModel(self._load())

    @cached_property
    def cost(self) -> CostModel:
        """What ours has learned of this machine's pace; an engine in service knows it too."""
        return CostModel()

    @cached_property
    def pages(self) -> list[list[int]]:
        """Pages of Python's own documentation as token ids."""
        texts = [f"\n\n{text}" for text in reference_pages()]
        encoded = self.tokenizer(texts, add_special_tokens=False)
        return list(encoded.input_ids)

    def words(self, seed: int) -> Iterator[int]:
        """Running text in which no page comes twice, in another order for every seed."""
        return dealt(self.pages, seed)

    def session(self, *, cost: CostModel | None = None, **options: Any) -> Session:
        """Our engine with these options and nothing stored."""
        chosen = make_options({"max_cache_bytes": 1024 * MIB, **options})
        is_snapped = chosen.chunk_boundary_window > 0
        parts = build(chosen, self.hosted, self._boundaries if is_snapped else frozenset())
        return Session(replace(parts, cost=cost or self.cost), self.tokenizer)

    def ask_bare(self, tokens: list[int]) -> BareAnswer:
        """Transformers' generate() on the prompt."""
        clock, prompt = TokenClock(), torch.tensor([tokens], device=self.bare.device)
        started = now(self.bare.device)
        output = self.bare.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_NEW,
            eos_token_id=NO_TOKEN,
            do_sample=False,
            stopping_criteria=[clock],
        )
        times_ms = [1e3 * (each - started) for each in clock.times]
        return BareAnswer(times_ms[0], times_ms[-1], output[0, len(tokens) :].tolist())

    def is_ours_first(self, number: int, *case: object) -> bool:
        """Whether ours begins in a round of a case: drawn by the seed once, then by turns."""
        is_first_in_even = random.Random(f"{self.seed} {case}").random() < 0.5
        return is_first_in_even == (number % 2 == 0)

    def compare(self, session: Session, tokens: list[int], *, is_ours_first: bool) -> Pair:
        """Ask both the same."""
        if is_ours_first:
            asked, bare = session.ask(tokens), self.ask_bare(tokens)
        else:
            bare, asked = self.ask_bare(tokens), session.ask(tokens)
        return self.pair(tokens, asked, bare)

    def beside(self, sessions: Mapping[N, Session], tokens: list[int], seed: int) -> dict[N, Pair]:
        """Ask the bare model and several of ours the same, in an order that the seed chooses."""
        asked: dict[N, tuple[GenerationResult, float]] = {}
        for name in shuffled([None, *sessions], seed):
            if name is None:
                bare = self.ask_bare(tokens)
            else:
                asked[name] = sessions[name].ask(tokens)
        return {name: self.pair(tokens, asked[name], bare) for name in sessions}

    def pair(
        self, tokens: list[int], asked: tuple[GenerationResult, float], bare: BareAnswer
    ) -> Pair:
        """The two answers to one prompt."""
        ours, store_ms = asked
        found = ours.prompt_tokens - ours.reuse.tokens(MatchKind.MISS)
        return Pair(
            ours_ms=ours.ttft_ms,
            bare_ms=bare.ttft_ms,
            ours_total_ms=ours.total_ms,
            bare_total_ms=bare.total_ms,
            top1=self.agreement(tokens, ours.token_ids, bare.tokens),
            cached_share=ours.kv_reuse_ratio,
            found_share=found / ours.prompt_tokens,
            load_ms=ours.reuse.load_ms,
            store_ms=store_ms,
        )

    def agreement(self, prompt: list[int], said: list[int], bare_said: list[int]) -> float:
        """Share of an answer's tokens that the bare model, led along it, finds most likely."""
        if said == bare_said:
            return 1.0
        tokens = torch.tensor([prompt + said[:-1]], device=self.bare.device)
        with torch.inference_mode():
            logits = self.bare(tokens, logits_to_keep=len(said), use_cache=False).logits[0]
        return share_same(said, logits.argmax(-1).tolist())

    def warm_up(self) -> None:
        """Let both models and the allocator see some work before anything is timed."""
        session, words = self.session(reuse="auto"), self.words(self.seed - 1)
        first, second = layouts(words, 256)
        for tokens in (take(words, self.lengths[-1]), first, first, second):
            self.compare(session, tokens, is_ours_first=True)

    def close(self) -> None:
        """Give the hosted model back as it was, if it was loaded."""
        if "hosted" in self.__dict__:
            self.hosted.release()

    @cached_property
    def _boundaries(self) -> frozenset[int]:
        return boundary_tokens(self.tokenizer)

    def _load(self) -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(self.model, dtype=DTYPES[self.dtype])
        return loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def shuffled(items: Iterable[N], seed: int) -> list[N]:
    """The items in an order that the seed chooses."""
    each = list(items)
    return random.Random(seed).sample(each, len(each))


def dealt(pages: Sequence[list[int]], seed: int) -> Iterator[int]:
    """The tokens of all pages once, the pages in an order that the seed chooses."""
    return chain.from_iterable(shuffled(pages, seed))


def take(words: Iterator[int], num_tokens: int) -> list[int]:
    """The next tokens of a text."""
    return list(islice(words, num_tokens))


def layouts(words: Iterator[int], num_tokens: int) -> tuple[list[int], list[int]]:
    """Two prompts with the same documents, each at another place in the second one.

    A preface, documents of one length and a question; preface and question are new in each.
    """
    document_tokens = (num_tokens - 2 * QUESTION_TOKENS) // NUM_DOCUMENTS
    documents = [take(words, document_tokens) for _ in range(NUM_DOCUMENTS)]
    preface_tokens = num_tokens - QUESTION_TOKENS - NUM_DOCUMENTS * document_tokens
    turned = [*documents[2:], *documents[:2]]
    first, second = (
        [*take(words, preface_tokens), *chain.from_iterable(each), *take(words, QUESTION_TOKENS)]
        for each in (documents, turned)
    )
    return first, second


def continued(seen: list[int], words: Iterator[int], share: float = 0.9) -> list[int]:
    """A prompt of the same length that begins with a share of one that was seen."""
    kept = seen[: round(share * len(seen))]
    return kept + take(words, len(seen) - len(kept))


def share_same(said: Sequence[int], expected: Sequence[int]) -> float:
    """Share of places at which two answers of one length have the same token."""
    same = [one == other for one, other in zip(said, expected, strict=True)]
    return statistics.mean(same)


MEANS = ("top1", "cached_share", "found_share")  # all others are times


def middle(pairs: Sequence[Pair]) -> Row:
    """Medians of the times, means of the shares, and the median of the rounds' ratios."""
    columns = {name: [asdict(pair)[name] for pair in pairs] for name in asdict(pairs[0])}
    row: Row = {
        name: round(statistics.mean(each), 4) if name in MEANS else round_ms(each)
        for name, each in columns.items()
    }
    ratios = [pair.ours_ms / pair.bare_ms for pair in pairs]
    return row | {"ratio": round(statistics.median(ratios), 4), "pairs": len(pairs)}


def round_ms(times_ms: Sequence[float]) -> float:
    """The median, to a hundredth of a millisecond."""
    return round(statistics.median(times_ms), 2)


def pick(row: Row, *names: str, **renamed: str) -> Row:
    """Some fields of a row; `new=old` renames one."""
    return {new: row[old] for new, old in {**{name: name for name in names}, **renamed}.items()}
