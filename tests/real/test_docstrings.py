"""Every public name shows how it is used, and what it shows is what happens."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvboost
from kvboost import KVBoost
from loras import save_adapter

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def docstrings_of(name: str) -> dict[str, str]:
    """Of a public name, and of its public methods and properties in the order of the source."""
    named = getattr(kvboost, name)
    docs = {name: inspect.getdoc(named) or ""}
    for member in vars(named) if inspect.isclass(named) else ():
        value = getattr(named, member)
        if not member.startswith("_") and (callable(value) or isinstance(value, property)):
            docs[f"{name}.{member}"] = inspect.getdoc(value) or ""
    return docs


GROUPS = {
    "kvboost": {"kvboost": inspect.getdoc(kvboost) or ""},
    **{name: docstrings_of(name) for name in kvboost.__all__},
}
DOCSTRINGS = {name: text for group in GROUPS.values() for name, text in group.items()}


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(smol: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where examples run: has an adapter."""
    folder = tmp_path_factory.mktemp("examples")
    save_adapter(load(smol), folder / "adapters" / "tone")
    return folder


@pytest.fixture(scope="module")
def names(smol: str) -> Iterator[dict[str, Any]]:
    """What examples need not make: an engine, and another model without one."""
    with KVBoost.from_pretrained(smol, dtype=torch.float32) as engine:
        tokenizer = AutoTokenizer.from_pretrained(smol)
        yield {"engine": engine, "model": load(smol), "tokenizer": tokenizer}


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_every_public_name_has_an_example(name: str) -> None:
    assert doctest.DocTestParser().get_examples(DOCSTRINGS[name])


def test_help_of_the_package_lists_all_names() -> None:
    assert [name for name in kvboost.__all__ if f"`{name}`" not in DOCSTRINGS["kvboost"]] == []


@pytest.mark.model
@pytest.mark.parametrize("group", GROUPS)
def test_examples_show_what_happens(
    group: str,
    names: dict[str, Any],
    smol: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Methods go on with what the example of their class has made, each on an empty store."""
    monkeypatch.chdir(folder)
    output: list[str] = []
    found, parser = dict(names), doctest.DocTestParser()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    try:
        for name, text in GROUPS[group].items():
            forget_all(found["engine"])
            example = parser.get_doctest(text.replace(MODEL, smol), found, name, None, None)
            runner.run(example, out=output.append, clear_globs=False)
            found = example.globs
    finally:
        if found["engine"] is not names["engine"]:
            found["engine"].close()
    assert runner.tries > 0
    assert runner.failures == 0, "".join(output)


def forget_all(engine: KVBoost) -> None:
    engine.flush()
    for tenant in ("", "somebody else"):
        engine.contents.delete(None, tenant=tenant)
