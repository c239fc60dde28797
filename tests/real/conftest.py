"""The official client of OpenAI on the server that the real tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from servers import KVBoostServer


@pytest.fixture(scope="module")
def client(live: KVBoostServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id
