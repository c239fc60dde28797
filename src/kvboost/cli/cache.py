"""`kvboost cache`: lists, checks and cleans the folder of a disk tier."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.cli import flags
from kvboost.config import certified_folder
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.codecs.frame import Head
    from kvboost.tiers.disk.tier import DiskTier

MODEL_DIGITS = 6  # of a namespace, at its end
ANY_SIZE = 2**62  # a budget that changes nothing


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their flags."""
    flags.about(
        parser,
        "Inspects, checks and cleans the folder of a disk tier. Stop engines and servers that use "
        "it first; only ls works beside them.",
        "kvboost cache ls kv-cache",
        "kvboost cache verify kv-cache --json",
        "kvboost cache clear kv-cache",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, run, text in (
        ("ls", _ls, "list what is stored, by model and tenant"),
        ("verify", _verify, "read and check every frame; exit code 1 if any is damaged"),
        ("gc", _gc, "delete damaged frames and free unused space"),
        ("clear", _clear, "delete everything"),
    ):
        action = actions.add_parser(name, help=text)
        flags.about(action, f"{text.capitalize()}.", f"kvboost cache {name} kv-cache")
        action.add_argument("folder", metavar="FOLDER", help="the folder, or its file:// URL")
        flags.add_json(action)
        action.set_defaults(run=run)


def _folder(options: argparse.Namespace) -> Path:
    from kvboost.tiers.disk.folder import LOCK_NAME  # noqa: PLC0415  (numpy comes with tiers)
    from kvboost.tiers.urls import folder_of  # noqa: PLC0415

    folder = folder_of(options.folder)
    if not (folder / LOCK_NAME).exists():
        raise ConfigError(f"{folder} is not the folder of a disk tier")
    return folder


def _tier(options: argparse.Namespace) -> DiskTier:
    from kvboost.tiers.disk.tier import DiskTier  # noqa: PLC0415

    return DiskTier(_folder(options), ANY_SIZE)


def _tell(options: argparse.Namespace, counts: dict[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(counts) if options.json else text.format(**counts)) + "\n")


def _ls(options: argparse.Namespace) -> int:
    from kvboost.tiers.disk.folder import heads  # noqa: PLC0415

    chunks: Counter[tuple[str, str, str]] = Counter()
    tokens: Counter[tuple[str, str, str]] = Counter()
    size_bytes: Counter[tuple[str, str, str]] = Counter()
    names = _model_names()
    for head in heads(_folder(options)):
        kind = _kind(head)
        chunks[kind] += 1
        tokens[kind] += head.entry.num_tokens
        size_bytes[kind] += head.payload.stop
    rows = [
        {
            "namespace": kind[0],
            "model": names.get(kind[0][-MODEL_DIGITS:]),
            "kv": kind[1],
            "codec": kind[2],
            "chunks": chunks[kind],
            "tokens": tokens[kind],
            "mb": round(size_bytes[kind] / 2**20, 1),
        }
        for kind in sorted(chunks)
    ]
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    for row in rows:
        sys.stdout.write(
            f"{row['namespace']}  {row['chunks']:>7} chunks  {row['tokens']:>9} tokens  "
            f"{row['mb']:>9} MB  {row['codec']:<4}  {row['model'] or row['kv']}\n"
        )
    total_mb = sum(size_bytes.values()) / 2**20
    sys.stdout.write(f"{sum(chunks.values())} chunks, {total_mb:.1f} MB\n")
    return 0


def _model_names() -> dict[str, str]:
    """Names of models that were certified here, by the end of their namespaces."""
    from kvboost.codecs.base import CODEC_NAMES  # noqa: PLC0415
    from kvboost.models.kept import model_names  # noqa: PLC0415
    from kvboost.reuse.keys import namespace  # noqa: PLC0415

    return {
        namespace(fingerprint, "", None, codec).hex()[-MODEL_DIGITS:]: name
        for fingerprint, name in model_names(certified_folder()).items()
        for codec in CODEC_NAMES.values()
    }


def _kind(head: Head) -> tuple[str, str, str]:
    from kvboost.codecs.base import CODEC_NAMES  # noqa: PLC0415

    space = head.entry.space  # its halves are the tenant and the model
    return (
        (space[:3] + space[-3:]).hex(),
        head.geometry,
        CODEC_NAMES.get(head.codec, str(head.codec)),
    )


def _verify(options: argparse.Namespace) -> int:
    tier = _tier(options)
    counts = {
        "chunks": tier.stats().num_entries,
        "damaged": len(list(tier.damaged())),
        "lost": tier.num_unreadable,
    }
    tier.close()
    text = "{chunks} chunks, {damaged} damaged, {lost} index records unreadable or dangling"
    _tell(options, counts, text)
    return int(counts["damaged"] + counts["lost"] > 0)


def _gc(options: argparse.Namespace) -> int:
    tier = _tier(options)
    damaged = list(tier.damaged())
    tier.discard(damaged)
    freed_bytes = tier.compact()
    counts = {
        "kept": tier.stats().num_entries,
        "dropped": len(damaged),
        "freed_mb": round(freed_bytes / 2**20, 1),
    }
    tier.close()
    text = "{kept} chunks kept, {dropped} damaged chunks deleted, {freed_mb:.1f} MB freed"
    _tell(options, counts, text)
    return 0


def _clear(options: argparse.Namespace) -> int:
    from kvboost.tiers.disk.folder import clear  # noqa: PLC0415

    folder = _folder(options)
    before_bytes = _size_bytes(folder)
    clear(folder)
    freed_bytes = before_bytes - _size_bytes(folder)
    _tell(options, {"freed_mb": round(freed_bytes / 2**20, 1)}, "{freed_mb:.1f} MB freed")
    return 0


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
