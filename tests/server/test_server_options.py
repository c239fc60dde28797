"""Options of the server: flags, variables and a file, from one definition."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from fakes import WordTokenizer
from kvboost.config import Options
from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.server.options import ServerOptions, add_flags, read_options
from kvboost.server.serve import _load
from tiny_models import REFUSED, build

PROMISED = """--model --host --port --device --dtype --backend --max-cache-bytes
--recompute-strategy --kv-cache-bits --batch-window-ms --max-batch-size --max-queue-size --warm
--workers --block-size --num-blocks --api-keys --config --cors-origin --max-body-bytes
--max-prompt-tokens --max-new-tokens --request-deadline-s --drain-s --served-model-name
--log-format --docs"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(made)
    return made


def read(flags: str = "", environ: dict[str, str] | None = None) -> tuple[ServerOptions, Options]:
    given = vars(parser().parse_args(f"--model m {flags}".split()))
    return read_options(given, environ or {})


def config(tmp_path: Path, text: str) -> str:
    (tmp_path / "kvboost.toml").write_text(text)
    return f"--config {tmp_path / 'kvboost.toml'}"


@pytest.mark.parametrize("flag", PROMISED.split())
def test_every_promised_flag_is_there_and_has_a_variable(flag: str) -> None:
    text = parser().format_help()
    assert f"{flag} " in text or f"{flag}, " in text
    if flag != "--config":
        assert "KVBOOST_" + flag[2:].upper().replace("-", "_") in "".join(text.split())


def test_help_says_what_kind_of_value_an_option_takes() -> None:
    text = parser().format_help()
    for shown in (
        "--drain-s SECONDS", "--api-keys FILE", "--max-body-bytes SIZE", "--port PORT",
        "--adapter NAME=MODEL", "--cache-url URL", "--log-format {auto,json,text}", "--workers N",
    ):  # fmt: skip
        assert f"  {shown}" in text
    assert "VALUE" not in text


def test_without_anything_all_has_its_default() -> None:
    server, engine = read()
    assert (server.host, server.port, server.model_name) == ("127.0.0.1", 8000, "m")
    assert engine == Options()


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, "port = 1\nchunk_size = 16\nmax_batch_size = 2\nwarm = ['a', 'b c']")
    environ = {"KVBOOST_PORT": "2", "KVBOOST_CHUNK_SIZE": "32"}
    server, engine = read(f"{file} --port 3", environ)
    assert (server.port, engine.chunk_size, engine.max_batch_size) == (3, 32, 2)
    assert server.warm == ("a", "b c")


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    path = config(tmp_path, "port = 17").split()[1]
    assert read("", {"KVBOOST_CONFIG": path})[0].port == 17


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 << 30), ("1.5 KiB", 1536), ("3MB", 3_000_000), ("77", 77), ("9B", 9)],
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert read("", {"KVBOOST_MAX_CACHE_BYTES": text})[1].max_cache_bytes == num_bytes


@pytest.mark.parametrize("short", ["fp32", "float32"])
def test_dtypes_have_short_names(short: str) -> None:
    assert read(f"--dtype {short}")[0].dtype == "float32"
    assert read(environ={"KVBOOST_DTYPE": short})[0].dtype == "float32"


def test_texts_become_the_types_of_their_options() -> None:
    server, engine = read(
        "--warm a --warm b --no-strict --deterministic --drain-s 2 --num-blocks none",
        {"KVBOOST_ALLOW_ANONYMOUS": "yes", "KVBOOST_CORS_ORIGIN": "http://a http://b"},
    )
    assert server.warm == ("a", "b")
    assert server.cors_origin == ("http://a", "http://b")
    assert (server.allow_anonymous, server.drain_s) == (True, 2.0)
    assert (engine.strict, engine.deterministic, engine.num_blocks) == (False, True, None)


def test_an_empty_variable_is_none() -> None:
    assert read("", {"KVBOOST_PORT": ""})[0].port == 8000


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KVBOOST_PORT": "http"}, "port='http': expected a whole number from 0 to 65535"),
        ({"KVBOOST_DTYPE": "int3"}, "dtype='int3': expected one of auto, float32"),
        ({"KVBOOST_STRICT": "perhaps"}, "strict='perhaps': expected True or False"),
        ({"KVBOOST_KV_CACHE_BITS": "3"}, "kv_cache_bits=3: expected 16, 8 or 4"),
        ({"KVBOOST_BACKEND": "slot"}, "backend='slot': expected one of auto, paged"),
        ({"KVBOOST_MAX_CACHE_BYTES": "4G"}, "max_cache_bytes='4G': expected a whole number"),
        ({"KVBOOST_REQUEST_DEADLINE_S": "nan"}, "request_deadline_s=nan: expected a number"),
    ],
)
def test_a_wrong_value_is_told_with_its_place_and_what_is_allowed(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read("", environ)
    assert message in str(error.value)
    assert f"was set by variable {next(iter(environ))}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_sise = 3", "unknown option 'max_batch_sise'; did you mean 'max_batch_size'?"),
        ("config = 'x'", "unknown option 'config'"),
        ("port = [", "kvboost.toml: "),
        ("warm = 5", "warm=5: expected a list of strings; warm was set by config file"),
        ("host = 5", "host=5: expected a string; host was set by config file"),
        ("port = true", "port=True: expected a whole number"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(config(tmp_path, text))
    assert message in str(error.value)
    assert "kvboost.toml" in str(error.value)


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"config file nowhere\.toml: "):
        read("--config nowhere.toml")


def test_other_machines_are_served_with_keys_or_on_demand_only() -> None:
    with pytest.raises(ConfigError, match=r"host='0\.0\.0\.0': without --api-keys"):
        read("--host 0.0.0.0")
    assert read("--host 0.0.0.0 --api-keys f")[0].host == "0.0.0.0"
    assert read("--host 0.0.0.0 --allow-anonymous")[0].host == "0.0.0.0"
    assert read("--host ::1")[0].is_local
    assert read("--host localhost")[0].is_local
    with pytest.raises(ConfigError, match="exclude each other"):
        read("--api-keys f --allow-anonymous")


def test_pages_of_any_origin_need_keys_or_anonymous_callers() -> None:
    with pytest.raises(ConfigError, match=r"cors_origin='\*'"):
        read("--cors-origin *")
    assert read("--cors-origin * --allow-anonymous")[0].cors_origin == ("*",)


def test_a_model_without_reuse_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, settings, _ = REFUSED["bloom-alibi"]
    loaded = build(kind, settings), WordTokenizer()
    monkeypatch.setattr("kvboost.models.load.load_or_tell", lambda *_: loaded)
    with pytest.raises(UnsupportedModel, match="strict=False is for the library"):
        _load(ServerOptions(model="tiny"), Options(strict=False))


def test_more_than_one_worker_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="workers=2: expected 1, because one process owns"):
        read("--workers 2")


def test_the_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="--model"):
        read_options({}, {})


def test_server_and_engine_have_no_option_in_common() -> None:
    names = [{each.name for each in dataclasses.fields(kind)} for kind in (ServerOptions, Options)]
    assert not names[0] & names[1]


def test_a_folder_without_a_model_is_named_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        _load(ServerOptions(model=str(tmp_path)), Options())
