from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from asking import client_of
from fake_serving import Stand


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.fixture
def client(stand: Stand) -> Iterator[TestClient]:
    yield client_of(stand)
