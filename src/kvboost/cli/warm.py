"""`kvboost warm`: prefills texts into tiers that outlive the process."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvboost.cli import flags, prompts
from kvboost.cli.loading import loaded, read_document
from kvboost.core import counted
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost

Progress: TypeAlias = Callable[[int, int], None]  # tokens done, and of how many

STEP_TOKENS = 1024  # between two signs of progress; whole chunks


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Prefills texts and stores their K/V in a folder or a shared store, for other processes "
        "with the same model. With --reuse exact, `kvboost generate --document` finds a text that "
        "is its first document; with --raw, any prompt that begins with the text finds it. "
        "With --reuse auto, calls with --reuse auto find the text anywhere in a prompt, "
        "approximately; calls with --reuse exact do not find it.",
        "kvboost warm handbook.md --model FOLDER --disk-cache-dir kv-cache",
        "kvboost warm docs/ --reuse auto --model FOLDER --cache-url redis://127.0.0.1:6379",
    )
    parser.set_defaults(run=_warm)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="text file; folder: all text files in it; - for standard input",
    )
    prompts.add_raw(parser)
    flags.add_model(parser)
    flags.add_reuse(parser, ("exact", "auto"))
    flags.add_tiers(parser)
    flags.add_json(parser)


def _warm(options: argparse.Namespace) -> int:
    if not (options.disk_cache_dir or options.cache_url):
        options.fail("nothing to save to: pass --disk-cache-dir or --cache-url")
    texts = dict(pair for path in options.paths for pair in _texts(path))
    if not texts:
        raise ConfigError("these folders have no text files")
    started = time.perf_counter()
    num_tokens = num_computed = 0
    with loaded(options) as engine:
        for name, text in texts.items():
            say = _silent if options.json else _progress(name)
            tokens, computed = warm_text(engine, text, say, reuse=options.reuse, raw=options.raw)
            num_tokens, num_computed = num_tokens + tokens, num_computed + computed
        engine.flush()
    counts = {
        "texts": len(texts),
        "tokens": num_tokens,
        "computed_tokens": num_computed,
        "seconds": round(time.perf_counter() - started, 3),
    }
    if options.json:
        sys.stdout.write(json.dumps(counts) + "\n")
    else:
        sys.stdout.write(
            f"{counted(len(texts), 'text')}, {counted(num_tokens, 'token')}, "
            f"{num_computed} of them computed, {counts['seconds']:.1f} s\n"
        )
    return 0


def _silent(done: int, total: int) -> None:
    """No progress."""


def warm_text(
    engine: KVBoost, text: str, say: Progress = _silent, *, reuse: str, raw: bool
) -> tuple[int, int]:
    """Store a text as `generate` looks for it; its tokens, and how many of them were computed."""
    if reuse == "auto":
        found = engine.warm(text, anywhere=True)
        say(found.num_tokens, found.num_tokens)
        return found.num_tokens, found.num_computed
    tokens = prompts.tokens_before_question(engine, text, raw=raw)
    num_computed = 0
    for stop in (*range(STEP_TOKENS, len(tokens), STEP_TOKENS), len(tokens)):
        num_computed += engine.warm(tokens[:stop]).num_computed
        say(stop, len(tokens))
    return len(tokens), num_computed


def _progress(name: str) -> Progress:
    """Progress of a text: a line that is written over on a terminal, and one at its end."""

    def say(done: int, total: int) -> None:
        line = f"warming {name}: {done:,} of {total:,} tokens"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{line}" + "\n" * (done == total))
        elif done == total:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    return say


def _texts(name: str) -> Iterator[tuple[str, str]]:
    """Names and contents of text files."""
    path = Path(name)
    if not path.is_dir():
        yield name, read_document(name)
        return
    for file in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if is_hidden or not file.is_file():
            continue
        try:
            text = read_document(str(file))
        except UnicodeDecodeError:
            sys.stderr.write(f"skipping {file}: not a text file\n")
            continue
        if text:
            yield str(file), text
