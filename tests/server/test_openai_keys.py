"""API keys as the official client meets them."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI

from servers import KVBoostServer

pytestmark = pytest.mark.servers


def client_with(server: KVBoostServer, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def ask(client: OpenAI, max_tokens: int = 2) -> object:
    return client.completions.create(model="tiny", prompt="hello", max_tokens=max_tokens)


def test_a_wrong_key_is_an_authentication_error(guarded: KVBoostServer) -> None:
    with client_with(guarded, "kvb-wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
        assert refused.value.code == "invalid_api_key"
    with client_with(guarded, "plain-key") as client:
        assert client.models.list().data[0].id == "tiny"


def test_only_an_administrator_sees_the_statistics(guarded: KVBoostServer) -> None:
    with (
        client_with(guarded, "plain-key") as client,
        pytest.raises(openai.PermissionDeniedError),
    ):
        client.get("/stats", cast_to=object)
    with client_with(guarded, guarded.api_key) as client:
        assert client.get("/stats", cast_to=object)["model"] == "tiny"


def test_too_many_requests_are_a_rate_limit_error_that_says_when_to_come_back(
    guarded: KVBoostServer,
) -> None:
    with client_with(guarded, "few-requests-key") as client:
        ask(client)
        ask(client)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(client)
    assert refused.value.type == "requests"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30


def test_too_many_tokens_are_a_rate_limit_error(guarded: KVBoostServer) -> None:
    with client_with(guarded, "few-tokens-key") as client:
        ask(client)
        with pytest.raises(openai.RateLimitError) as refused:
            for _ in range(3):
                ask(client, max_tokens=16)
    assert refused.value.type == "tokens"
