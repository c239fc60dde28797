"""Arguments of the application's builder."""

from __future__ import annotations

from typing import Any

import pytest
from ray import serve

from kvboost.errors import ConfigError
from kvboost.fleet.app import app, read_arguments


def test_arguments_are_those_of_the_server_and_of_the_fleet() -> None:
    fleet, server, engine = read_arguments(
        {
            "model": "folder/m",
            "replicas": "3",
            "num_cpus": "0.5",
            "max_cache_bytes": "256MB",
            "cache_url": "redis://h:1",
            "drain_s": 4,  # as YAML has it
            "allow_anonymous": "yes",
        }
    )
    assert (fleet.replicas, fleet.scale, fleet.num_cpus) == (3, (3, 3), 0.5)
    assert (server.model_name, server.drain_s, server.allow_anonymous) == ("m", 4.0, True)
    assert (engine.max_cache_bytes, engine.cache_url) == (256_000_000, "redis://h:1")


def test_variables_count_as_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_MODEL", "a/b")
    monkeypatch.setenv("KVBOOST_CHUNK_SIZE", "32")
    _, server, engine = read_arguments({"chunk_size": "64"})
    assert (server.model, engine.chunk_size) == ("a/b", 64)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replica": "2"}, "unknown option 'replica'; did you mean 'replicas'"),
        ({"max_cache_byte": "2"}, "did you mean 'max_cache_bytes'"),
        ({"port": "80"}, "port: is Ray Serve's to know"),
        ({"host": "0.0.0.0"}, "host: is Ray Serve's to know"),
        ({"replicas": "many"}, "replicas='many': expected a number"),
        ({"replicas": "0"}, "replicas=0: expected a whole number of at least 1"),
        ({"num_cpus": "-1"}, "num_cpus=-1.0: expected"),
        ({"routing": "best"}, "routing='best': expected one of reuse, default"),
        ({"autoscale": "4:1"}, "autoscale='4:1': expected a text"),
        ({"autoscale": "0:2"}, "expected a text"),
        ({"autoscale": 64}, "autoscale=64: expected a text"),  # YAML's 1:4
        ({"chunk_size": "1"}, "chunk_size=1: expected"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments({"model": "m", **wrong})


def test_the_application_is_built_without_a_cluster() -> None:
    for arguments in ({}, {"routing": "default"}, {"autoscale": "1:4", "reuse": "auto"}):
        assert isinstance(app({"model": "m", **arguments}), serve.Application)
