"""`kvboost warm`: reads texts into tiers that outlive the process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from kvboost.cli import flags
from kvboost.cli.loading import loaded
from kvboost.errors import ConfigError


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Reads texts before they are needed, and keeps their K/V in a folder or a shared store, "
        "where other processes with the same model find it. With --reuse exact a text is found "
        "where a prompt begins with it. With --reuse auto it is kept as a document: calls with "
        "--reuse auto find it anywhere in a prompt, approximately, and calls with --reuse exact do "
        "not find it, not even at the beginning.",
        "kvboost warm handbook.md --model FOLDER --disk-cache-dir kv-cache",
        "kvboost warm docs/ --reuse auto --model FOLDER --cache-url redis://127.0.0.1:6379",
    )
    parser.set_defaults(run=_warm, fail=parser.error)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="file with a text; folder: all files in and below it that are text; - for standard "
        "input",
    )
    flags.add_model(parser)
    flags.add_reuse(parser, ("exact", "auto"))
    flags.add_tiers(parser)
    flags.add_json(parser)


def _warm(options: argparse.Namespace) -> int:
    if not (options.disk_cache_dir or options.cache_url):
        options.fail("nothing would be left: give --disk-cache-dir or --cache-url")
    texts = [text for path in options.paths for text in _texts(path)]
    if not texts:
        raise ConfigError("there is no text to warm in these folders")
    with loaded(options) as engine:
        found = engine.warm(texts)
        engine.flush()
    counts = {
        "texts": found.num_texts,
        "tokens": found.num_tokens,
        "computed_tokens": found.num_computed,
        "seconds": round(found.total_ms / 1e3, 3),
    }
    if options.json:
        sys.stdout.write(json.dumps(counts) + "\n")
    else:
        sys.stdout.write(
            "{texts} texts, {tokens} tokens, {computed_tokens} of them computed, "
            "{seconds:.1f} s\n".format(**counts)
        )
    return 0


def _texts(name: str) -> Iterator[str]:
    if name == "-":
        yield sys.stdin.read()
        return
    path = Path(name)
    if not path.is_dir():
        yield path.read_text(encoding="utf-8")
        return
    for file in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if is_hidden or not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            sys.stderr.write(f"{file} is left out: it is no text\n")
            continue
        if text.strip():
            yield text
