"""Real GGUF files, end to end: loaded, asked, checked and served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import httpx
import pytest
import torch
from openai import AsyncOpenAI

from get_model import models_folder
from kvboost import KVBoost
from kvboost.engine.results import CorrectnessReport, GenerationResult
from kvboost.models.load import limits
from kvboost.server.app import make_app
from kvboost.server.grammar import Grammars
from kvboost.server.keys import KeyRing
from kvboost.server.options import ServerOptions
from kvboost.server.plans import Served
from kvboost.server.telemetry import Telemetry

pytestmark = pytest.mark.model

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
RULES = """You answer travellers. The night train to the coast leaves at ten from platform four.
Seats are booked at the counter, beds only by telephone, and dogs travel in the last carriage. In
winter the train ends at the harbour, where a ferry waits until the last guest is on board."""
QUESTIONS = ("When does the night train leave?", "Where do dogs travel?")
NEW_TOKENS = 8


@dataclass
class Seen:
    """What a file's model said, by every way to ask it."""

    capital: GenerationResult
    cold: list[GenerationResult]
    warm: list[GenerationResult]
    plain: list[list[int]]
    verified: CorrectnessReport
    served: Any
    end_of_turn: int


@pytest.fixture(
    scope="module", params=["gguf-smol", pytest.param("gguf-qwen05", marks=pytest.mark.long)]
)
def seen(request: pytest.FixtureRequest) -> Seen:
    """Everything is asked of one engine: to load a file takes long."""
    file = models_folder() / request.param / "model.gguf"
    if not file.exists():
        pytest.skip(f"no {request.param} in {models_folder()}: run `just models`")
    chats = [travel(question) for question in QUESTIONS]
    with read_once(), KVBoost.from_pretrained(str(file), dtype=torch.float32) as engine:
        tokenizer, model = engine.tokenizer, engine._parts.model.model
        capital = engine.chat(CAPITAL, 32)
        cold = [engine.chat(chat, NEW_TOKENS, reuse="off") for chat in chats]
        engine.warm(chats[0][:1])
        warm = [engine.chat(chat, NEW_TOKENS) for chat in chats]
        verified = engine.verify_correctness([RULES + QUESTIONS[0]], NEW_TOKENS)
        served = asyncio.run(ask_as_a_client(engine, model))
    plain = []  # by the same weights, which the engine has given back
    for chat in chats:
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        plain.append(output[0, ids["input_ids"].shape[1] :].tolist())
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return Seen(capital, cold, warm, plain, verified, served, end_of_turn)


@contextmanager
def read_once() -> Iterator[None]:
    """Transformers reads a file three times, and lists all names of tensors for each layer."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        yield


def travel(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": question}]


async def ask_as_a_client(engine: KVBoost, model: Any) -> Any:
    """The whole application with the engine that is there; only the socket is left out."""
    vocab_size, longest = limits(model)
    options = ServerOptions(model="model.gguf")
    served = Served(options.model_name, vocab_size, longest or 4096, 4)
    grammars, telemetry = Grammars(engine.tokenizer, vocab_size), Telemetry(engine, model="it")
    app = make_app(engine, options, telemetry, grammars, model=served, keys=KeyRing(()))
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport) as http:
        client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)
        return await client.chat.completions.create(
            model=options.model_name, messages=CAPITAL, temperature=0, max_tokens=32
        )


def test_a_question_is_answered_to_its_end(seen: Seen) -> None:
    assert "Paris" in seen.capital.output_text
    assert seen.capital.token_ids[-1] == seen.end_of_turn
    assert "<|" not in seen.capital.output_text


def test_warm_answers_are_those_of_a_cold_engine_and_of_transformers(seen: Seen) -> None:
    assert [each.token_ids for each in seen.warm] == [each.token_ids for each in seen.cold]
    assert [each.token_ids for each in seen.cold] == seen.plain
    assert all(each.cached_tokens > 50 for each in seen.warm)


def test_the_built_in_check_holds(seen: Seen) -> None:
    assert seen.verified, str(seen.verified)


def test_a_server_gives_the_same_answer_and_ends_it(seen: Seen) -> None:
    choice = seen.served.choices[0]
    assert choice.message.content == seen.capital.output_text
    assert choice.finish_reason == "stop"
    assert seen.served.usage.prompt_tokens_details.cached_tokens > 0
