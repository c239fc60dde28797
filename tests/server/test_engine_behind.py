"""The real engine behind the API, with a tiny random model."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from fake_serving import FakeGrammars, FakeTelemetry
from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.server.app import make_app
from kvboost.server.options import ServerOptions
from kvboost.server.plans import Served
from tiny_models import SUPPORTED, VOCABULARY, build

pytestmark = pytest.mark.tiny


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with KVBoost(build(*SUPPORTED["llama"]), WordTokenizer(), chunk_size=16) as made:
        yield made


@pytest.fixture
def client(engine: KVBoost) -> Iterator[TestClient]:
    options = ServerOptions(model="tiny")
    model = Served("tiny", VOCABULARY, 4096)
    app = make_app(engine, options, FakeTelemetry(), FakeGrammars(), model=model)
    with TestClient(app, base_url="http://localhost") as client:  # one event loop for all threads
        yield client


def ask(client: TestClient, prompt: list[int], **body: Any) -> Any:
    given = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **body}
    reply = client.post("/v1/completions", json=given)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_answers_are_those_of_generate_and_the_second_time_from_the_cache(
    client: TestClient, engine: KVBoost
) -> None:
    prompt = words(60, seed=1)
    alone = engine.generate(prompt, 8, reuse="off", eos_token_id=None).output_text
    cold = ask(client, prompt, reuse="off")
    assert cold["choices"][0]["text"] == alone
    assert cold["choices"][0]["finish_reason"] == "length"
    ask(client, prompt)
    engine.flush()
    warm = ask(client, prompt)
    assert warm["choices"][0]["text"] == alone
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    assert warm["kvboost"]["prompts"][0]["exact_tokens"] >= 48


@pytest.mark.parametrize("is_chat", [False, True])
def test_documents_in_any_order_continue_a_stored_prompt(
    client: TestClient, engine: KVBoost, *, is_chat: bool
) -> None:
    texts = (map(str, words(50, seed)) for seed in range(40 + 10 * is_chat, 44 + 10 * is_chat))
    documents = [" ".join(each) for each in texts]

    def asked(given: list[str], **body: Any) -> Any:
        prompt = " 7 8 ".join(["5 6", *given, "9 10"])
        messages = [{"role": "user", "content": prompt}]
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        what = {"messages": messages} if is_chat else {"prompt": prompt}
        reply = client.post(path, json={**what, "temperature": 0, "max_tokens": 4, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    asked(documents[:2])
    engine.flush()
    other = [documents[2], documents[1], documents[0]]
    told = asked(other, documents=other, order="any", n=2)["kvboost"]["prompts"]
    assert len(told) == 1 and told[0]["document_order"] == [2, 1, 0]
    assert told[0]["exact_tokens"] > 90
    assert asked(other)["kvboost"]["prompts"][0]["document_order"] is None


def test_order_without_documents_is_refused(client: TestClient) -> None:
    body = {"prompt": "5 6", "order": "any"}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "order"
    reply = client.post("/v1/completions", json=body | {"order": "all", "documents": ["5"]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "order"


def test_concurrent_answers_are_those_alone(client: TestClient) -> None:
    prompts = [words(40 + seed, seed=seed) for seed in range(8)]
    alone = [ask(client, prompt, reuse="off")["choices"][0]["text"] for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: ask(client, prompt), prompts))
    assert [each["choices"][0]["text"] for each in together] == alone


def test_many_prompts_and_parameters_pass_through(client: TestClient) -> None:
    body = ask(client, [words(20, seed=2), words(30, seed=3)], n=2, seed=3, temperature=1.0)
    assert len(body["choices"]) == 4
    assert body == body | {"choices": ask(client, [words(20, seed=2), words(30, seed=3)], n=2,
                                          seed=3, temperature=1.0)["choices"]}  # fmt: skip
    logprobs = ask(client, words(20), logprobs=2)["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 8
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_the_cache_is_listed_pinned_and_emptied(client: TestClient, engine: KVBoost) -> None:
    text = " ".join(map(str, words(64, seed=9)))
    assert client.post("/v1/warm", json={"text": text, "tenant": "t"}).json()["num_computed"] == 64
    chunks = client.get("/v1/cache?tenant=t").json()["data"]
    assert [each["num_tokens"] for each in chunks] == [16] * 4
    assert text.startswith(min(chunks, key=lambda each: each["position"])["text"].strip())
    assert client.get("/v1/cache?tenant=other").json()["data"] == []
    start = " ".join(text.split()[:33])
    pinned = client.post("/v1/cache/pin", json={"text": start, "tenant": "t", "ttl_s": 60.0})
    assert pinned.json()["num_pinned"] >= 2
    deleted = client.post("/v1/cache/delete", json={"everything": True, "tenant": "t"}).json()
    assert deleted["num_deleted"] == 4
    assert client.get("/v1/cache?tenant=t").json()["data"] == []
    assert engine.explain(text, tenant="t").spans[0].kind.value == "miss"


def test_stats_come_from_the_engine(client: TestClient) -> None:
    stats = client.get("/v1/stats").json()
    assert stats["batch"]["max_batch_size"] == 16
    assert stats["engine"]["requests"] > 0
