"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvboost.config import Options
from kvboost.connectors.vllm.options import OPTIONS, STRATEGIES, read_options
from kvboost.errors import ConfigError


def test_what_is_not_said_is_as_everywhere() -> None:
    assert read_options({}) == Options()
    assert Options().recompute_strategy in STRATEGIES


def test_what_is_said_is_taken() -> None:
    said = {"reuse": "exact", "chunk_size": 64, "disk_cache_dir": "/cache", "max_chunks": 9}
    assert read_options(said) == Options(**said)  # type: ignore[arg-type]


def test_all_names_are_those_of_options() -> None:
    names = {field.name for field in fields(Options)}
    assert set(OPTIONS) <= names
    for name in OPTIONS:
        assert read_options({name: getattr(Options(), name)}) == Options()


def test_the_guide_names_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "vllm.md").read_text()
    section = text.partition("\n## Options\n")[2].partition("\n## ")[0]
    assert [name for name in OPTIONS if f"`{name}`" not in section] == []


def test_an_unknown_name_is_told_with_what_was_probably_meant() -> None:
    with pytest.raises(ConfigError, match=r"'chunk_sise' inside vLLM; did you mean 'chunk_size'\?"):
        read_options({"reuse": "auto", "chunk_sise": 64})
    with pytest.raises(ConfigError, match=r"'colour' inside vLLM$"):
        read_options({"colour": "red"})


def test_an_option_of_what_vllm_does_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="no option 'max_batch_size' inside vLLM"):
        read_options({"max_batch_size": 8})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_that_go_by_tokens_are_taken(strategy: str) -> None:
    assert read_options({"recompute_strategy": strategy}).recompute_strategy == strategy


@pytest.mark.parametrize("strategy", ["cacheblend", "query", "all of it"])
def test_strategies_that_need_more_than_tokens_are_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match="recompute_strategy"):
        read_options({"recompute_strategy": strategy})


@pytest.mark.parametrize("values", [{"chunk_size": 0}, {"reuse": "much"}, {"audit_ratio": 2.0}])
def test_a_wrong_value_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        read_options(values)
