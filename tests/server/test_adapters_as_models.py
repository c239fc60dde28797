"""Adapters by the names of models, over HTTP; and what is wrong with --adapter."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from fake_serving import Stand
from kvboost.errors import ConfigError
from kvboost.server.options import ServerOptions
from loras import save_adapter
from servers import kvboost_server
from tiny_models import save

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_model_names_the_adapter_of_a_request() -> None:
    stand = Stand()
    with TestClient(stand.app, base_url="http://127.0.0.1") as client:
        for name, adapter in (("terse", "terse"), ("fake", None), (None, None)):
            for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "hi"})):
                reply = client.post(f"/v1/{path}", json={**body, "model": name}).json()
                assert reply["model"] == (adapter or "fake")
                assert stand.engine.calls[-1]["adapter"] == adapter
            client.post("/v1/warm", json={"text": "hello", "model": name})
            assert stand.engine.warmed[-1][1]["adapter"] == adapter
        for path, body in (("completions", {"prompt": "hi"}), ("warm", {"text": "hello"})):
            reply = client.post(f"/v1/{path}", json={**body, "model": "curt"})
            assert reply.status_code == 404
            assert "available: 'fake', 'terse'" in reply.json()["error"]["message"]


def test_adapters_are_listed_with_their_base_model() -> None:
    with TestClient(Stand().app, base_url="http://127.0.0.1") as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("fake", None),
            ("terse", "fake"),
        ]
        assert client.get("/v1/models/terse").json() == cards[1]
        assert client.get("/v1/models/curt").status_code == 404


def test_adapters_are_named_once_and_with_a_folder() -> None:
    read = ServerOptions(model="models/smol", adapter=("a=folder/a", "b=hub/b=c")).adapters
    assert read == {"a": "folder/a", "b": "hub/b=c"}
    for wrong in (("a",), ("=folder",), ("a=",), ("a=x", "a=y"), ("smol=x",)):
        with pytest.raises(ConfigError, match="expected NAME=FOLDER, each name once"):
            ServerOptions(model="models/smol", adapter=wrong)


@pytest.mark.tiny
def test_a_client_chooses_adapters_by_model_name(tmp_path: Any) -> None:
    folder = save(tmp_path / "tiny")
    for seed, name in enumerate("ab"):
        save_adapter(AutoModelForCausalLM.from_pretrained(folder), tmp_path / name, seed)
    flags = [flag for name in "ab" for flag in ("--adapter", f"{name}={tmp_path / name}")]
    with kvboost_server(folder, tmp_path / "log", "--dtype", "float32", *flags) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        parents = {card.id: card.parent for card in client.models.list()}
        assert parents == {"tiny": None, "a": "tiny", "b": "tiny"}
        prompt, texts = "the same words again and again " * 8, {}
        for turn in range(2):
            for name in parents:
                answer = client.completions.create(
                    model=name, prompt=prompt, max_tokens=12, temperature=0
                )
                cached = answer.usage.prompt_tokens_details.cached_tokens
                assert (cached > 0) == (turn > 0)
                assert texts.setdefault(name, answer.choices[0].text) == answer.choices[0].text
                assert answer.model == name
        assert len({*texts.values()}) == 3
        with pytest.raises(NotFoundError):
            client.completions.create(model="c", prompt=prompt)
        stats = server._get("/v1/stats")["engine"]
        assert stats["foreign_frames"] == 0
        assert all(row["cache_hits"] > 0 for row in stats["adapters"].values())
        metric = 'kvboost_adapter_prompt_tokens_total{adapter="a",kind="exact"}'
        assert metric in httpx.get(f"{server.url}/metrics").text
