"""API keys as the official client meets them."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI

from servers import KVBoostServer

pytestmark = pytest.mark.servers


def client_with(server: KVBoostServer, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_a_wrong_key_is_an_authentication_error(guarded: KVBoostServer) -> None:
    with client_with(guarded, "kvb-wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
        assert refused.value.code == "invalid_api_key"
    with client_with(guarded, "plain-key") as client:
        assert client.models.list().data[0].id == "tiny"
