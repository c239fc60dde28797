"""`kvboost analyze`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from kvboost.cli.main import main

ROOT = Path(__file__).parents[2]
MAX_MEMORY_KB = 250_000


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Four prompts over half an hour that begin with the same two blocks."""
    lines = [
        {"timestamp": 600_000 * n, "input_length": 2000, "hash_ids": [1, 2, 10 + n, 20 + n]}
        for n in range(4)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    sentences = [f"Sentence {n} of a text says {n * n} and {n * 77 % 101}. " for n in range(200)]
    text = "".join(sentences)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}: {text}"}) + "\n" for n in range(3)))
    return str(path)


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["analyze", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_trace_in_words(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["analyze", trace, "--cache-tokens", "1K", "8k", "--bytes-per-kv-token", "1e6"]) == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("4 requests, 8K prompt tokens in 30.0 min\n")
    assert "prefix N: beginnings" in shown and "content: cannot be told" in shown
    assert ["prefix", "512", "38.4%", "37.5%"] in [line.split() for line in shown.splitlines()]
    assert [line.split() for line in shown.splitlines()[-2:]] == [
        ["1K", "1", "GB", "19.2%"],
        ["8K", "8", "GB", "38.4%"],
    ]


def test_json_has_time_and_money_for_a_day(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cache-tokens", "8000", "--prefill-speed", "1000", "--price", "10"]
    told = printed([trace, *options], capsys)
    assert told["saved_per"] == "day"
    assert told["prompt_tokens"] == 8000
    (row,) = told["curves"]["prefix 512"]["by_cache_tokens"]
    assert row["value"] == pytest.approx(3 * 1024 / 8000)
    assert row["prefill_h"] == pytest.approx(3 * 1024 * 48 / 1000 / 3600)
    assert row["money"] == pytest.approx(3 * 1024 * 48 / 1e6 * 10)


def test_texts_have_content_and_any_block_size(
    texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = printed([texts, "--block-tokens", "48", "64"], capsys)["curves"]
    assert list(curves) == ["prefix 48", "prefix 64", "content"]
    assert curves["prefix 48"]["share_of_tokens"]["value"] == 0  # the first character differs
    assert curves["content"]["share_of_tokens"]["value"] > 0.6
    assert main(["analyze", texts, "--price", "1"]) == 0
    assert "saved in a log by" in capsys.readouterr().out


def test_fleets(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--replicas", "1", "2", "--routing", "round-robin", "reuse"]
    fleets = printed([trace, *options], capsys)["fleets"]
    assert [(each["num_replicas"], each["routing"]) for each in fleets] == [
        (1, "round-robin"),
        (1, "reuse"),
        (2, "round-robin"),
        (2, "reuse"),
    ]
    assert [each["reused"] for each in fleets] == pytest.approx([0.384, 0.384, 0.256, 0.384])
    assert main(["analyze", trace, *options]) == 0
    assert "p95 wait" in capsys.readouterr().out


def test_bytes_of_a_model(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    fields = {"num_hidden_layers": 10, "num_attention_heads": 8, "hidden_size": 512}
    config.write_text(json.dumps(fields | {"num_key_value_heads": 2, "dtype": "float32"}))
    told = printed([trace, "--model-config", str(config), "--cache-tokens", "100"], capsys)
    (row,) = told["curves"]["prefix 512"]["by_cache_tokens"]
    assert row["cache_bytes"] == 100 * 10 * 2 * 64 * 2 * 4
    config.write_text('{"num_hidden_layers": 10}')
    assert main(["analyze", trace, "--model-config", str(config)]) == 1
    assert "unknown or no 'num_attention_heads'" in capsys.readouterr().err


def test_the_picture_is_svg(texts: str, tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    assert main(["analyze", texts, "--plot", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg")
    words = " ".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "cache size in tokens" in words
    assert "content: 6" in words
    assert "prefix 128: 0.0 %" in words
    assert not any("href" in name and "http" in value for name, value in links(root))


def links(root: ElementTree.Element) -> list[tuple[str, str]]:
    return [item for each in root.iter() for item in each.attrib.items()]


def test_broken_lines_are_left_out_and_counted(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(trace).open("a") as file:
        file.write('{"hash_ids": "?"}\n')
    assert main(["analyze", trace, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_skipped_lines"] == 1
    assert err.startswith("kvboost: skipping line 5: input_length=None")


def test_a_long_log_through_a_pipe_stays_small_and_loads_no_torch() -> None:
    check = (
        "import sys\n"
        "from kvboost.cli.main import main\n"
        "code = main(['analyze', '--json'])\n"
        "status = open('/proc/self/status').read() if sys.platform == 'linux' else 'VmHWM: 0'\n"
        "sys.stderr.write(status.split('VmHWM:')[1].split()[0])\n"
        "sys.exit(code or 'torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    make = [sys.executable, str(ROOT / "scripts" / "make_log.py"), "--requests", "130000"]
    with subprocess.Popen(make, stdout=subprocess.PIPE) as maker:
        asked = subprocess.run(
            [sys.executable, "-c", check], stdin=maker.stdout, capture_output=True, check=False
        )
    assert asked.returncode == 0, asked.stderr
    told = json.loads(asked.stdout)
    assert told["num_requests"] == 130_000
    assert told["curves"]["prefix 512"]["sampling_rate"] < 1
    assert int(asked.stderr) < MAX_MEMORY_KB
