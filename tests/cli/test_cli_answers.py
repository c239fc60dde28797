"""`generate`, `chat`, `warm` and `verify` as a user calls them; the model is tiny and random."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes import byte_tokenizer
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


def message(text: str) -> str:
    """A question in the template of the tiny model, whose tokens are bytes."""
    return f"<user>{text}\n<assistant>"


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_prompt_is_taken_from_everywhere(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    few = ("generate", "--raw", "--model", model, "--max-new-tokens", "4")
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
        assert f"0% of {len(message(TEXT))} prompt tokens reused; first token" in printed.err


def test_sampling_flags_sample_and_a_seed_repeats(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("generate", TEXT, "--model", model, "--max-new-tokens", "16")

    def text(*flags: str) -> str:
        return str(told(capsys, *few, *flags)["text"])

    drawn = {seed: text("--temperature", "5", "--seed", seed) for seed in ("1", "2", "3")}
    assert len({*drawn.values()}) > 1
    assert text("--temperature", "5", "--seed", "2") == drawn["2"]
    greedy = text()
    assert text("--temperature", "0", "--top-p", "0.5", "--seed", "2") == greedy
    assert text("--temperature", "5", "--top-k", "1", "--seed", "2") == greedy
    assert text("--top-p", "1.0", "--seed", "2") != greedy  # alone, it samples too


def test_an_instruct_model_gets_its_chat_template(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("generate", "Why?", "--model", model, "--max-new-tokens", "2")
    assert told(capsys, *few)["prompt_tokens"] == len(message("Why?"))
    assert told(capsys, *few, "--raw")["prompt_tokens"] == len("Why?")


def test_an_empty_answer_says_why(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = str(shutil.copytree(model, tmp_path / "short"))
    host, tokenizer = AutoModelForCausalLM.from_pretrained(model), byte_tokenizer()
    with torch.no_grad():
        logits = host(torch.tensor([tokenizer(TEXT).input_ids])).logits[0, -1]
        weight = host.lm_head.weight
        weight[tokenizer.eos_token_id] = 100 * weight[int(logits.argmax())]
    host.save_pretrained(short)
    assert main(["generate", TEXT, "--raw", "--model", short]) == 0
    printed = capsys.readouterr()
    assert printed.out == "\n"
    assert "the answer is empty: the model ended it with its first token" in printed.err
    assert "without --raw it gets its chat template" in printed.err


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
    assert "picture: not a text file" in printed.err
    counts = json.loads(printed.out)
    num_tokens = len(f"<user>{TEXT.strip()}\n\n")
    assert counts.pop("seconds") > 0
    assert counts == {"texts": 2, "tokens": 2 * num_tokens, "computed_tokens": 2 * num_tokens}
    assert main(["warm", str(folder / "a.txt"), *where]) == 0
    printed = capsys.readouterr()
    assert f"1 text, {num_tokens} tokens, 1 of them computed" in printed.out
    assert f"a.txt: {num_tokens} of {num_tokens} tokens" in printed.err
    document = ("--document", str(folder / "sub" / "b.txt"))
    found = told(capsys, "generate", "Why?", *document, *where, "--max-new-tokens", "2")
    assert found["exact_tokens"] == num_tokens
    assert found["prompt_tokens"] == num_tokens + len(message("Why?")) - len("<user>")
    plain = ("--raw", *where)
    found = told(capsys, "generate", "Why?", *document, *plain, "--max-new-tokens", "2")
    assert found["exact_tokens"] == 0
    assert main(["warm", str(folder / "a.txt"), *plain]) == 0
    capsys.readouterr()
    document = ("--document", str(folder / "a.txt"))
    found = told(capsys, "generate", "Why?", *document, *plain, "--max-new-tokens", "2")
    assert found["exact_tokens"] == len(TEXT.strip()) + 2


def test_a_long_text_is_warmed_in_steps_that_are_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 4)
    where = ("--model", model, "--disk-cache-dir", str(tmp_path / "kv"), "--raw")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["warm", str(tmp_path / "long.txt"), *where]) == 0
    printed, total = capsys.readouterr(), len((TEXT * 4).strip()) + 2
    assert re.findall(r"([\d,]+) of [\d,]+ tokens", printed.err) == ["1,024", f"{total:,}"]
    assert f"1 text, {total} tokens, {total} of them computed" in printed.out


def test_explain_sees_a_warmed_document_as_generate_does(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "ask.txt").write_text(f"{TEXT.strip()}\n\nWhy?")
    flags = ("--document", str(tmp_path / "a.txt"), "--model", model)
    spans = told(capsys, "explain", str(tmp_path / "ask.txt"), *flags)["spans"]
    assert spans[0]["kind"] == "exact" and spans[0]["stop"] == len(f"<user>{TEXT.strip()}\n\n")


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
    assert "prompt 2: same answer" in capsys.readouterr().out
    assert main([*call, "--reuse", "auto"]) == 1  # they share nothing
    printed = capsys.readouterr().out
    assert "nothing was reused" in printed and "versions: kvboost " in printed
