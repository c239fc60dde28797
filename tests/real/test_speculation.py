"""Prompt lookup and assistants on top of reused K/V: the same text, and nothing wrong stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvboost import KVBoost
from kvboost.core import MatchKind, Span
from kvboost.engine.prefill import Terms, complete, prefill

pytestmark = pytest.mark.model

CODE = '''\
class Account:
    """Money of one customer."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))
'''
EDITS = (
    "Rename the method deposit to add_money.",
    "Rename history to log.",
    "Add a method transfer(self, other, amount) at the end.",
)
NUM_NEW = 24


def edit_prompt(edit: str) -> str:
    return f"```python\n{CODE}```\n\n{edit} The whole file after the edit:\n\n```python\n"


class Bare:
    """What Transformers alone answers, greedily, token by token."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def tokens(self, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": num_new, "do_sample": False}
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def engine(smol: str) -> Iterator[KVBoost]:
    with KVBoost.from_pretrained(smol, dtype=torch.float32, chunk_size=32) as made:
        yield made


@pytest.fixture(scope="module")
def bare(smol: str) -> Bare:
    return Bare(smol)


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens each forward of `model` computes."""
    sizes: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: sizes.append(output.shape[1])
    )
    try:
        yield sizes
    finally:
        hook.remove()


def ids(engine: KVBoost, text: str) -> list[int]:
    tokens: list[int] = engine.tokenizer(text).input_ids
    return tokens


def assert_lookup_keeps_the_text(
    engine: KVBoost, bare: Bare, edits: tuple[str, ...], num_new: int = NUM_NEW
) -> None:
    num_forwards = num_tokens = 0
    for edit in edits:
        prompt = ids(engine, edit_prompt(edit))
        wanted = bare.tokens(prompt, num_new)
        cold = engine.generate(prompt, num_new, prompt_lookup_num_tokens=10)
        assert cold.token_ids == wanted and (cold.cached_tokens > 100) == (edit != edits[0])
        with counted(engine._parts.model.model) as sizes:
            warm = engine.generate(prompt, num_new, prompt_lookup_num_tokens=10)
        assert warm.token_ids == wanted and warm.cached_tokens == len(prompt) - 1
        num_forwards, num_tokens = num_forwards + len(sizes), num_tokens + len(wanted)
    assert num_forwards < 0.9 * num_tokens  # guesses were kept


def test_prompt_lookup_gives_the_greedy_text_cold_and_warm(engine: KVBoost, bare: Bare) -> None:
    assert_lookup_keeps_the_text(engine, bare, EDITS[:2])


@pytest.mark.long
def test_prompt_lookup_gives_the_greedy_text_on_a_second_architecture(coder: str) -> None:
    with KVBoost.from_pretrained(coder, dtype=torch.float32, chunk_size=32) as second:
        assert_lookup_keeps_the_text(second, Bare(coder), EDITS[:1], num_new=16)


def test_prompt_lookup_gives_the_text_that_moved_reuse_has_without_it(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether moved text is worth its repair is another matter, which the clock decides.
    monkeypatch.setattr(engine._parts.cost, "pays", lambda *work: True)
    code = f"```python\n{CODE}```\n"
    answers = []
    for tenant, lookup in (("plain", {}), ("lookup", {"prompt_lookup_num_tokens": 3})):
        own: dict[str, Any] = {"tenant": tenant}
        engine.generate(f"Some code:\n{code}What is it?", 1, **own)
        prompt = f"Read this, which someone else has written.\n{code}\nThe file again:\n```"
        answers.append(engine.generate(prompt, NUM_NEW, reuse="auto", **own, **lookup))
    plain, fast = answers
    assert plain.cached_tokens == fast.cached_tokens > 100
    assert fast.reuse.tokens(MatchKind.MOVED) == plain.reuse.tokens(MatchKind.MOVED) > 100
    assert fast.token_ids == plain.token_ids


def test_an_assistant_model_gives_the_greedy_text_on_reused_rows(
    engine: KVBoost, bare: Bare
) -> None:
    prompt = ids(engine, edit_prompt(EDITS[1]))
    wanted = bare.tokens(prompt)
    for assistant in (bare.model, engine._parts.model.model):
        own = {"tenant": f"assistant {id(assistant)}"}
        for cached in (0, len(prompt) - 1):
            result = engine.generate(prompt, NUM_NEW, assistant_model=assistant, **own)
            assert (result.token_ids, result.cached_tokens) == (wanted, cached)


def test_a_stream_with_prompt_lookup_yields_the_greedy_text(engine: KVBoost, bare: Bare) -> None:
    prompt = ids(engine, edit_prompt(EDITS[0]))
    stream = engine.stream(prompt, NUM_NEW, prompt_lookup_num_tokens=10, tenant="stream")
    pieces = list(stream)
    assert "".join(pieces) == engine.tokenizer.decode(bare.tokens(prompt)) and len(pieces) > 3


def test_rejected_tokens_are_never_stored(engine: KVBoost, bare: Bare) -> None:
    prompt, model = ids(engine, edit_prompt(EDITS[2])), engine._parts.model
    own: dict[str, Any] = {"tenant": "rejected"}
    with counted(model.model) as sizes:
        first = engine.generate(prompt, NUM_NEW, prompt_lookup_num_tokens=10, **own)
    num_computed = len(prompt) + len(first.token_ids) - 1
    assert sum(sizes) > num_computed + 10  # candidates were computed and thrown away
    follow_up = prompt + first.token_ids + ids(engine, "\n\nWhat was changed?")
    engine.flush()
    found = prefill(follow_up, engine._parts, Terms("exact", "rejected"), capacity=1000)
    assert found.num_cached == num_computed
    fresh = prefill(follow_up, engine._parts, Terms("off", "rejected"), capacity=1000)
    complete(fresh, follow_up, engine._parts)
    span = Span(0, num_computed)
    for ours, wanted in zip(found.rows.read(span), fresh.rows.read(span), strict=True):
        assert torch.allclose(ours, wanted, atol=2e-3)
    second = engine.generate(follow_up, 24, **own)
    assert second.cached_tokens == num_computed
    assert second.token_ids == bare.tokens(follow_up, 24)
