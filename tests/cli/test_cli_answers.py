"""`generate`, `chat`, `warm` and `verify` as a user calls them; the model is tiny and random."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from kvboost.cli.main import main
from kvboost.models.hf import HFModel
from tiny_models import save

pytestmark = pytest.mark.tiny

TEXT = "The town lies where two rivers meet. In spring the water rises. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("tiny"))


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert isinstance(printed, dict)
    return printed


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_prompt_is_taken_from_everywhere(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    few = ("generate", "--model", model, "--max-new-tokens", "4")
    answers = [told(capsys, *few, TEXT), told(capsys, *few, "--file", str(tmp_path / "prompt.txt"))]
    for flags in ((), ("--file", "-")):
        say(monkeypatch, TEXT)
        answers.append(told(capsys, *few, *flags))
    assert len({(each["text"], each["prompt_tokens"]) for each in answers}) == 1
    assert answers[0]["new_tokens"] == 4
    assert answers[0]["miss_tokens"] == answers[0]["prompt_tokens"]


def test_text_goes_to_output_and_the_rest_to_errors(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["generate", TEXT, "--model", model, "--max-new-tokens", "4"]
    expected = told(capsys, *few)["text"] + "\n"
    for flags in ([], ["--stream"], ["--no-stream"]):
        assert main([*few, *flags]) == 0
        printed = capsys.readouterr()
        assert printed.out == expected
        assert f"0% of {len(TEXT)} prompt tokens reused; first token after" in printed.err


def test_temperature_draws(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("generate", TEXT, "--model", model, "--max-new-tokens", "16")
    texts = {told(capsys, *few, "--temperature", heat)["text"] for heat in ("5", "6", "7")}
    assert len(texts) > 1


def test_warm_documents_are_found_by_another_engine(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kept = tmp_path / "docs", str(tmp_path / "kv")
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    (folder / "sub" / "b.txt").write_text(TEXT[::-1])
    (folder / "picture").write_bytes(b"\xff\xfe\xfa")
    (folder / ".hidden").write_text("no")
    (folder / "empty").write_text("")
    where = ("--model", model, "--disk-cache-dir", kept)
    assert main(["warm", str(folder), *where, "--json"]) == 0
    printed = capsys.readouterr()
    assert "picture is left out" in printed.err
    counts = json.loads(printed.out)
    assert counts.pop("seconds") > 0
    assert counts == {"texts": 2, "tokens": 2 * len(TEXT), "computed_tokens": 2 * len(TEXT)}
    assert main(["warm", str(folder / "a.txt"), *where]) == 0
    assert f"1 texts, {len(TEXT)} tokens, 1 of them computed" in capsys.readouterr().out
    document = ("--document", str(folder / "sub" / "b.txt"))
    found = told(capsys, "generate", "Why?", *document, *where, "--max-new-tokens", "2")
    assert found["exact_tokens"] == len(TEXT)
    assert found["prompt_tokens"] == len(TEXT) + len("\n\nWhy?")


def test_a_conversation_reuses_its_history(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = ["chat", "--model", model, "--max-new-tokens", "4"]
    say(monkeypatch, f"{TEXT}\n\nAnd then?\n/exit\nnot read\n")
    assert main([*chat, "--system", "Be kind.", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert second["prompt_tokens"] > first["prompt_tokens"] > len(TEXT)
    assert first["cached_tokens"] == 0 and second["cached_tokens"] > len(TEXT)


def test_a_conversation_ends_with_its_input_or_an_interrupt(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = ["chat", "--model", model, "--max-new-tokens", "4"]
    say(monkeypatch, "Hello")
    assert main(chat) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("\n") and "[0% of " in printed.err

    class Interrupted(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert main(chat) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_verify_tells_all_that_a_report_needs(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = told(capsys, "verify", "--model", model, "--max-new-tokens", "4")
    assert page["holds"] is True and page["verdict"].startswith("correct: 2 of 2")
    assert [each["first_difference"] for each in page["checks"]] == [None, None]
    assert {*page["versions"]} == {"kvboost", "transformers", "torch", "python", "platform"}
    host = AutoModelForCausalLM.from_pretrained(model)
    hosted = HFModel(host)
    assert page["model"] == {
        "name": model,
        "class": "LlamaForCausalLM",
        "dtype": "float32",
        "device": "cpu",
        "fingerprint": hosted.fingerprint.hex(),
    }
    hosted.release()


def test_verify_fails_where_nothing_was_checked(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, text in zip(prompts, (TEXT, TEXT[::-1]), strict=True):
        path.write_text(text)
    call = ["verify", *map(str, prompts), "--model", model, "--max-new-tokens", "2"]
    assert main(call) == 0
    assert "prompt 2: the same answer" in capsys.readouterr().out
    assert main([*call, "--reuse", "auto"]) == 1  # they share nothing
    printed = capsys.readouterr().out
    assert "nothing was reused" in printed and "versions: kvboost " in printed
