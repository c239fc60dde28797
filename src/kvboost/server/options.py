"""Server options, once: flags, KVBOOST_* variables, the config file and help come from the fields.

A flag wins over a variable, a variable over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvboost.config import MIB, SHORT_DTYPES, Options, checked, option, unknown_option
from kvboost.errors import ConfigError
from kvboost.server.logs import LogStyle

PREFIX = "KVBOOST_"
ABOUT = (
    "Serve a model with an OpenAI-compatible API. Options come from flags, KVBOOST_* variables "
    "or the --config file, in this order of precedence."
)
WORDS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False, "no": False, "off": False, "0": False
}  # fmt: skip
UNITS = {"_bytes": "SIZE", "_s": "SECONDS", "_ms": "MS", "_ratio": "SHARE", "_quota": "SHARE"}
METAVARS = {
    "model": "MODEL",
    "gguf_file": "FILE",
    "adapter": "NAME=MODEL",
    "host": "ADDRESS",
    "port": "PORT",
    "device": "DEVICE",
    "warm": "FILE",
    "api_keys": "FILE",
    "cors_origin": "ORIGIN",
    "quality_budget": "KL",
    "kv_cache_bits": "BITS",
    "disk_cache_dir": "FOLDER",
    "cache_url": "URL",
    "cache_secret": "SECRET",
}


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What `kvboost serve` takes besides the engine's options."""

    model: str = option("", "hub name, folder or GGUF file of the model (required)")
    gguf_file: str | None = option(None, "GGUF file inside the folder or repository of --model")
    served_model_name: str | None = option(
        None, "model name for clients; default: the last part of --model"
    )
    adapter: tuple[str, ...] = option(
        (), "PEFT adapter (folder or hub name); clients select it as a model by NAME"
    )
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free port", low=0, high=65535)
    device: str | None = option(None, "cpu, cuda, cuda:1 ...; default: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "dtype of the weights; auto: as stored"
    )
    max_weight_bytes: int | None = option(
        None, "budget for weights in memory; the rest is read layer by layer", low=1
    )
    warm: tuple[str, ...] = option((), "text file to prefill and store before the first request")
    workers: int = option(1, "only 1: a single process owns the model", low=1)
    api_keys: str | None = option(None, "file with API keys, made with `kvboost keys new`")
    allow_anonymous: bool = option(
        default=False,
        text="accept clients of other machines without API keys; disables admin paths",
    )
    cors_origin: tuple[str, ...] = option((), "origin of web pages that may call this server")
    docs: bool = option(
        default=False, text="interactive API docs at /docs (the page loads scripts from a CDN)"
    )
    max_body_bytes: int = option(8 * MIB, "largest request body accepted", low=1)
    max_header_bytes: int = option(32 * 1024, "largest request head accepted", low=1024)
    max_connections: int = option(
        1024,
        "most connections; a new one beyond closes the one that has waited for a request longest",
        low=16,
    )
    client_timeout_s: float = option(
        60.0,
        "time for a client to send a request head, to send more of a body (500 bytes/s at "
        "least), or to read more of a response",
        low=0.1,
    )
    max_prompt_tokens: int | None = option(
        None, "longest prompt; default: what the context holds", low=1
    )
    max_new_tokens: int = option(4096, "most output tokens", low=1)
    request_deadline_s: float = option(600.0, "time limit of a request", low=0.001)
    drain_s: float = option(30.0, "time for running requests to finish at shutdown", low=0.0)
    log_format: LogStyle = option("auto", "log format; auto: text on a terminal, else json")

    def __post_init__(self) -> None:
        for each, hint in _fields(ServerOptions):
            value = checked(each, getattr(self, each.name))
            object.__setattr__(self, each.name, value)
            _check_text(each.name, hint, value)
        if not self.model:
            raise ConfigError("model='': expected a hub name, folder or GGUF file (--model)")
        names = [self.model_name, *(each.partition("=")[0] for each in self.adapter)]
        are_pairs = all(re.fullmatch("[^=]+=.+", each) for each in self.adapter)
        if not are_pairs or len({*names}) < len(names):
            raise ConfigError(f"adapter={self.adapter!r}: expected NAME=FOLDER, each name once")
        if self.workers != 1:
            raise ConfigError(
                f"workers={self.workers}: expected 1, because one process owns the model and "
                "batches all requests; to scale out, run several servers behind a load balancer"
            )
        if self.api_keys and self.allow_anonymous:
            raise ConfigError("api_keys and allow_anonymous exclude each other: set one")
        if "*" in self.cors_origin and not (self.api_keys or self.allow_anonymous):
            raise ConfigError(
                "cors_origin='*': any web page could call a server without --api-keys"
            )
        if not (self.api_keys or self.allow_anonymous or self.is_local):
            raise ConfigError(
                f"host={self.host!r}: without --api-keys, clients of other machines need "
                "--allow-anonymous"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        last = self.model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
        return self.served_model_name or last or self.model

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of adapters by their names for clients."""
        return dict(written.split("=", 1) for written in self.adapter)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option to a parser; flags not given are not in its result."""
    parser.usage = "%(prog)s --model MODEL [options]"
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help=f"TOML file with options ({PREFIX}CONFIG)",
    )
    for title, options in (("server", ServerOptions), ("engine", Options)):
        group = parser.add_argument_group(title)
        for each, hint in _fields(options):
            given: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(each, hint)}
            if hint is bool:
                given["action"] = argparse.BooleanOptionalAction
            else:
                given["metavar"] = _metavar(each.name, hint)
            if get_origin(hint) is tuple:
                given["action"] = "append"
            group.add_argument(_flag(each.name), **given)


def read_options(
    flags: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[ServerOptions, Options]:
    """The options of the server and of its engine, from all sources.

    Raises:
        ConfigError: an unknown name or a wrong value; the message says where it was set.
    """
    hints = {each.name: hint for kind in KINDS for each, hint in _fields(kind)}
    found: dict[str, tuple[Any, str]] = {}  # value as written, where
    path = flags.get("config") or environ.get(f"{PREFIX}CONFIG")
    if path:
        found |= _from_file(path, hints)
    for name in hints:
        if environ.get(_variable(name)):
            found[name] = (environ[_variable(name)], f"variable {_variable(name)}")
    found |= {name: (flags[name], f"flag {_flag(name)}") for name in hints if name in flags}
    values = {name: _value(hints[name], written) for name, (written, _) in found.items()}
    made = []
    for kind in KINDS:
        own = {each.name: values[each.name] for each, _ in _fields(kind) if each.name in values}
        try:
            made.append(kind(**own))
        except ConfigError as error:
            sources = [
                f"{n} was set by {at}" for n, (_, at) in found.items() if f"{n}=" in str(error)
            ]
            raise ConfigError("; ".join([str(error), *sources])) from None
    return made[0], made[1]


KINDS: tuple[Any, ...] = (ServerOptions, Options)


def _fields(kind: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The fields of an option class, with their types (without None)."""
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):
        hint = hints[each.name]
        if type(None) in get_args(hint):
            hint = next(one for one in get_args(hint) if one is not type(None))
        yield each, hint


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _metavar(name: str, hint: Any) -> str:
    """The placeholder of an option's value in the help."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    by_unit = (unit for suffix, unit in UNITS.items() if name.endswith(suffix))
    by_type = {int: "N", float: "X"}.get(hint, "NAME")
    return METAVARS.get(name) or next(by_unit, by_type)


def in_units(num_bytes: int) -> str:
    """A size as options take it."""
    return f"{num_bytes // MIB}MiB" if num_bytes >= MIB else f"{num_bytes // 1024}KiB"


def _help(each: dataclasses.Field[Any], hint: Any) -> str:
    default = each.default
    if each.name.endswith("_bytes") and isinstance(default, int):
        default = in_units(default)
    notes = [_variable(each.name)]
    if get_origin(hint) is tuple:
        notes.insert(0, "repeatable")
    elif default not in (None, ""):
        notes.insert(0, f"default: {default}")
    return f"{each.metadata['help']} ({'; '.join(notes)})".replace("%", "%%")


def read_toml(what: str, path: str) -> dict[str, Any]:
    """The table in a TOML file; `what` names the file in messages.

    Raises:
        ConfigError: the file cannot be read.
    """
    # Here, so that there are flags and help without the extra too.
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415

    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{what} {path}: {error}") from None


def _from_file(path: str, known: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    table = read_toml("config file", path)
    for name in table:
        if name not in known:
            raise ConfigError(f"config file {path}: {unknown_option(name, known)}")
    return {name: (value, f"config file {path}") for name, value in table.items()}


def _value(hint: Any, written: Any) -> Any:
    """The text in the option's type; unchanged if that fails, for the checks to refuse."""
    if get_origin(hint) is tuple:
        several = written.split() if isinstance(written, str) else written
        return tuple(several) if isinstance(several, list) else several
    if not isinstance(written, str):
        return float(written) if hint is float and type(written) is int else written
    if hint is bool:
        return WORDS.get(written.lower(), written)
    if hint in (int, float):
        if written.lower() == "none":
            return None
        try:
            return hint(written)
        except ValueError:
            return written
    return SHORT_DTYPES.get(written, written) if get_origin(hint) is Literal else written


def _check_text(name: str, hint: Any, value: Any) -> None:
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(get_args(hint))}")
    if hint is str and value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: expected a string")
    is_list = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    if get_origin(hint) is tuple and not is_list:
        raise ConfigError(f"{name}={value!r}: expected a list of strings")
