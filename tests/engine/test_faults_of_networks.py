"""A store behind a network that drags, loses packets or is cut: real packets, the kernel's TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from network import Link, linked_namespace
from servers import Server, find_program, free_port
from trials import DEADLINE_MS, trial

pytestmark = [pytest.mark.tiny, pytest.mark.servers, pytest.mark.alone]

FEW = 24  # deadlines: one is what a request waits, the rest is for pauses of a busy machine
BAD = {
    "50 ms": (0.05, 0.0),
    "5 % loss": (0.0, 0.05),
    "50 ms and 5 % loss": (0.05, 0.05),
    "cut": (0.0, 1.0),
}


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    with linked_namespace() as link:
        yield link


@pytest.fixture(scope="module")
def url(link: Link) -> Iterator[str]:
    port = free_port()
    command = [find_program("ip"), "netns", "exec", link.namespace, find_program("redis-server")]
    command += ["--port", str(port), "--bind", link.there, "--protected-mode", "no", "--save", ""]
    server = Server(command, port, host=link.there)
    yield f"redis://{link.there}:{port}"
    server.kill()


@pytest.fixture(scope="module")
def calm_s(url: str) -> float:
    with trial("redis", cache_url=url) as on:
        calm_s = on.run("a good network")
        assert on.stats()["hits"] > 0
        return calm_s


@pytest.mark.parametrize("name", BAD)
def test_a_bad_network_costs_bounded_waits(name: str, url: str, link: Link, calm_s: float) -> None:
    def begin() -> None:
        link.delay_s, link.loss = BAD[name]

    with trial("redis", cache_url=url) as on:
        on.run(f"a network with {name}", begin, link.clear, calm_s)
        # TCP alone would wait for a cut network for a quarter of an hour.
        assert on.longest_s < calm_s + FEW * DEADLINE_MS / 1e3
        assert on.stats()["faults"] > 0 or name != "cut"
        on.comes_back()
