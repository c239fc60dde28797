"""What users may rely on by name."""

import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import kvboost
from kvboost import ConfigError, GenerationMode, KVBoost
from kvboost.config import Options, OptionValues, make_options, option_names
from kvboost.engine.request import CallArguments
from kvboost.models.load import LoadArguments

ROOT = Path(__file__).parents[1]


def test_exported_names_are_pinned_and_resolve() -> None:
    assert kvboost.__all__ == [
        "CPUPagedEngine",
        "CacheError",
        "ConfigError",
        "CorrectnessReport",
        "GenerationMode",
        "GenerationResult",
        "KVBoost",
        "KVBoostError",
        "ReuseReport",
        "Sampling",
        "TextStream",
        "UnsupportedModel",
        "WarmResult",
        "flash_attention_available",
        "get_flash_attn_tier",
        "install_flash_attention",
        "uninstall_flash_attention",
    ]
    assert all(getattr(kvboost, name).__doc__ for name in kvboost.__all__)


def test_every_call_of_the_engine_is_documented() -> None:
    calls = [name for name in vars(KVBoost) if not name.startswith("_")]
    assert {
        "achat",
        "astream",
        "chat",
        "generate",
        "generate_batch",
        "stream",
        "verify_correctness",
    } <= {*calls}
    assert [name for name in calls if not inspect.getdoc(getattr(KVBoost, name))] == []


def test_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="Enginee"):
        _ = kvboost.Enginee


def test_modes_of_the_original_package_map_to_reuse() -> None:
    assert [mode.reuse for mode in GenerationMode] == ["off", "exact", "auto"]


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'chunksize'; did you mean 'chunk_size'\?"):
        make_options({"chunksize": 3})


def test_a_mistyped_loader_argument_is_found_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'revision'"):
        KVBoost.from_pretrained("nowhere", revison="main")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_size": 4}, "chunk_size=4: expected a whole number from 8 to 4096"),
        ({"chunk_size": True}, "chunk_size=True"),
        ({"chunk_size": None}, "chunk_size=None"),
        ({"strict": 1}, "strict=1: expected True or False"),
        ({"max_cache_bytes": 0}, "max_cache_bytes=0"),
        ({"max_disk_bytes": "4 gigs"}, "max_disk_bytes='4 gigs': .* or a size such as '4GiB'"),
        ({"reuse": "prefix"}, "reuse='prefix': expected one of off, exact, auto"),
        ({"chunk_boundary_window": 128}, "must be below chunk_size"),
        ({"deterministic": True, "piece_tokens": 200}, "a multiple of chunk_size"),
        ({"deterministic": True, "chunk_boundary_window": 8}, "chunk_boundary_window=0"),
    ],
)
def test_wrong_values_are_shown_with_what_is_allowed(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_options(values)


def test_sizes_may_have_units() -> None:
    options = make_options({"max_cache_bytes": "4GiB", "max_disk_bytes": "3 MB"})
    assert (options.max_cache_bytes, options.max_disk_bytes) == (4 << 30, 3_000_000)


def test_typed_arguments_are_the_options() -> None:
    """What editors complete is a copy, for type checkers read no dataclass as keywords."""
    typed, options = get_type_hints(OptionValues), get_type_hints(Options)
    for name in options:
        if name.endswith("_bytes"):
            options[name] |= str
    assert typed == options
    assert list(typed) == option_names()
    assert OptionValues.__optional_keys__ == set(typed)


def test_no_argument_means_two_things() -> None:
    ours, theirs = OptionValues.__optional_keys__, LoadArguments.__optional_keys__
    assert ours.isdisjoint(theirs)
    assert ours & CallArguments.__optional_keys__ == {"reuse"}


def test_changelog_has_the_version() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest.group(1) == kvboost.__version__
