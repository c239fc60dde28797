"""GGUF files, tiny ones: how they are named, and what is taken from them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from gguf import GGMLQuantizationType

from kvboost import KVBoost
from kvboost.cli import main as cli
from kvboost.config import Options
from kvboost.errors import ConfigError
from kvboost.server.options import ServerOptions
from kvboost.server.serve import _load
from servers import kvboost_server
from tiny_gguf import BOS, END, END_OF_TURN, write_gguf

pytestmark = pytest.mark.tiny

MESSAGES = [{"role": "user", "content": "How many rivers meet in this town? " * 4}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def fingerprint(path: Path, **arguments: object) -> bytes:
    with KVBoost.from_pretrained(str(path), **arguments) as engine:
        return engine._parts.model.fingerprint


def test_a_file_is_loaded_by_its_path_or_from_its_folder(file: Path) -> None:
    with (
        KVBoost.from_pretrained(str(file)) as by_path,
        KVBoost.from_pretrained(str(file.parent), gguf_file=file.name) as by_name,
    ):
        assert by_path.chat(MESSAGES, 8).token_ids == by_name.chat(MESSAGES, 8).token_ids


def test_a_folder_may_be_named_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    file = write_gguf(tmp_path / "folder.gguf" / "tiny.gguf")
    with KVBoost.from_pretrained(str(file.parent), gguf_file=file.name) as engine:
        assert engine.chat(MESSAGES, 1).token_ids


def test_a_file_of_the_same_name_in_the_working_folder_is_not_taken(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    trap = write_gguf(tmp_path / "elsewhere" / file.name, quantisation=GGMLQuantizationType.Q4_0)
    monkeypatch.chdir(trap.parent)
    assert fingerprint(file) != fingerprint(trap)


def test_warm_answers_are_those_of_transformers(file: Path) -> None:
    with KVBoost.from_pretrained(str(file)) as engine:
        cold, warm = engine.chat(MESSAGES, 24, reuse="off"), engine.chat(MESSAGES, 24)
        warm = engine.chat(MESSAGES, 24)
        model = engine._parts.model.model
    ids = engine.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    plain = model.generate(**ids, max_new_tokens=24, do_sample=False)
    assert warm.cached_tokens > 100
    assert warm.token_ids == cold.token_ids == plain[0, warm.prompt_tokens :].tolist()


def test_weights_have_the_dtype_that_was_asked_for_and_float32_otherwise(file: Path) -> None:
    for given, dtype in (({}, torch.float32), ({"dtype": torch.bfloat16}, torch.bfloat16)):
        with KVBoost.from_pretrained(str(file), **given) as engine:
            assert engine._parts.model.model.dtype == dtype


def test_the_template_is_that_of_the_file(tmp_path: Path) -> None:
    template = "{% for message in messages %}<<{{ message['content'] }}>>{% endfor %}"
    with KVBoost.from_pretrained(str(write_gguf(tmp_path / "a.gguf", template=template))) as engine:
        assert engine.chat(MESSAGES, 1).prompt_tokens == len(MESSAGES[0]["content"]) + 4


def test_a_file_without_a_template_answers_texts_but_no_chats(tmp_path: Path) -> None:
    with KVBoost.from_pretrained(str(write_gguf(tmp_path / "a.gguf", template=None))) as engine:
        assert engine.generate("one two three", 4).token_ids
        with pytest.raises(ValueError, match=r"chat_template is not set"):
            engine.chat(MESSAGES, 4)


@pytest.mark.parametrize("adds_bos", [True, False, None])
def test_a_text_begins_with_bos_where_the_file_says_so(
    tmp_path: Path, adds_bos: bool | None
) -> None:
    more = {} if adds_bos is None else {"add_add_bos_token": adds_bos}
    with KVBoost.from_pretrained(str(write_gguf(tmp_path / "a.gguf", **more))) as engine:
        tokens = engine.tokenizer("one").input_ids
        assert (engine.tokenizer.convert_ids_to_tokens(tokens[0]) == BOS) is bool(adds_bos)
        assert engine.tokenizer.add_bos_token is bool(adds_bos)
        assert engine.chat([{"role": "user", "content": "a"}], 1).prompt_tokens == len(
            "[user]a[assistant]") + 1  # fmt: skip


def test_an_answer_also_ends_at_the_end_of_a_turn(tmp_path: Path) -> None:
    ends = []
    for more in ({}, {"add_eot_token_id": 264}, {"add_eot_token_id": 265}):
        with KVBoost.from_pretrained(str(write_gguf(tmp_path / "a.gguf", **more))) as engine:
            ids = engine._parts.model.model.generation_config.eos_token_id
            ends.append(engine.tokenizer.convert_ids_to_tokens(ids))
    assert ends == [END, END, [END, END_OF_TURN]]


def test_the_fingerprint_is_of_the_weights_and_not_of_the_files_name(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    renamed = tmp_path / "folder" / "other.gguf"
    renamed.write_bytes(file.read_bytes())
    changed = bytearray(file.read_bytes())
    changed[-5] ^= 1  # in the last tensor
    (tmp_path / "changed.gguf").write_bytes(changed)
    coarser = write_gguf(tmp_path / "coarser.gguf", quantisation=GGMLQuantizationType.Q4_0)
    assert fingerprint(file) == fingerprint(renamed)
    others = [fingerprint(tmp_path / "changed.gguf"), fingerprint(coarser)]
    assert len({fingerprint(file), *others, fingerprint(file, dtype=torch.bfloat16)}) == 4


def test_the_fingerprint_is_the_same_in_another_process(file: Path) -> None:
    code = "import sys; from kvboost import KVBoost; engine = KVBoost.from_pretrained(sys.argv[1]);"
    code += "print(engine._parts.model.fingerprint.hex()); engine.close()"
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == fingerprint(file).hex()


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.gguf': there is no such file"):
        KVBoost.from_pretrained(str(tmp_path / "gone.gguf"))
    with pytest.raises(ConfigError, match=r"gone\.gguf"):
        KVBoost.from_pretrained(str(tmp_path), gguf_file="gone.gguf")


def test_a_missing_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install gguf accelerate"):
        KVBoost.from_pretrained(str(file))


def test_explain_reads_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "prompt.txt").write_text("The town lies where two rivers meet. " * 8)
    prompt = str(file.parent / "prompt.txt")
    command = ["explain", prompt, "--seen", prompt, "--json", "--reuse", "exact"]
    for model in (["--model", str(file)], ["--model", str(file.parent), "--gguf-file", file.name]):
        assert cli.main([*command, *model]) == 0
        assert json.loads(capsys.readouterr().out)["spans"][0]["kind"] == "exact"


@pytest.mark.servers
def test_the_command_serves_a_file(file: Path) -> None:
    with kvboost_server(str(file), file.parent / "log") as server:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
        url = f"{server.url}/v1/chat/completions"
        reply = [httpx.post(url, json=body, timeout=60).json() for _ in range(2)][-1]
    assert reply["usage"]["prompt_tokens"] == len("[user][assistant]") + 1 + len(
        MESSAGES[0]["content"])  # fmt: skip
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_a_server_loads_a_file_and_names_it(file: Path) -> None:
    by_path = ServerOptions(model=str(file))
    by_name = ServerOptions(model=str(file.parent), gguf_file=file.name, served_model_name="it")
    for options, name in ((by_path, "tiny"), (by_name, "it")):
        engine, served = _load(options, Options())
        engine.close()
        assert served.name == name
