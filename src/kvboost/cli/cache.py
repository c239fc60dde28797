"""`kvboost cache`: what lies in the folder of a disk tier, whether it is sound, and its removal."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.codecs.base import CODEC_NAMES
from kvboost.codecs.frame import Head
from kvboost.errors import ConfigError
from kvboost.tiers.disk.folder import LOCK_NAME, clear, heads
from kvboost.tiers.disk.tier import DiskTier
from kvboost.tiers.urls import folder_of

if TYPE_CHECKING:
    from kvboost.cli.main import Commands

ANY_SIZE = 2**62  # a budget that changes nothing


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    cache = commands.add_parser(
        "cache", help="look into the folder of a disk tier: ls, verify, gc, clear"
    )
    actions = cache.add_subparsers(dest="action", required=True)
    for name, run, text in (
        ("ls", _ls, "what is stored, by namespace (a digest of model, tenant and kind of storage)"),
        ("verify", _verify, "read every frame and check it; exit code 1 if any is damaged"),
        ("gc", _gc, "drop damaged frames and give room back that is not in use"),
        ("clear", _clear, "remove everything"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("folder", help="the folder, or its file:// URL")
        if name == "ls":
            action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=run)


def _folder(options: argparse.Namespace) -> Path:
    folder = folder_of(options.folder)
    if not (folder / LOCK_NAME).exists():
        raise ConfigError(f"{folder} is not the folder of a disk tier")
    return folder


def _ls(options: argparse.Namespace) -> int:
    chunks: Counter[tuple[str, str, str]] = Counter()
    tokens: Counter[tuple[str, str, str]] = Counter()
    size_bytes: Counter[tuple[str, str, str]] = Counter()
    for head in heads(_folder(options)):
        kind = _kind(head)
        chunks[kind] += 1
        tokens[kind] += head.entry.num_tokens
        size_bytes[kind] += head.payload.stop
    rows = [
        {
            "namespace": kind[0],
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
            f"{row['mb']:>9} MB  {row['codec']:<4}  {row['kv']}\n"
        )
    total_mb = sum(size_bytes.values()) / 2**20
    sys.stdout.write(f"{sum(chunks.values())} chunks, {total_mb:.1f} MB\n")
    return 0


def _kind(head: Head) -> tuple[str, str, str]:
    return head.entry.space[:6].hex(), head.geometry, CODEC_NAMES.get(head.codec, str(head.codec))


def _verify(options: argparse.Namespace) -> int:
    tier = DiskTier(_folder(options), ANY_SIZE)
    num_damaged = len(list(tier.damaged()))
    num_lost = tier.num_unreadable
    sys.stdout.write(
        f"{tier.stats().num_entries} chunks, {num_damaged} damaged, "
        f"{num_lost} records of the index that cannot be read or lead nowhere\n"
    )
    tier.close()
    return int(num_damaged + num_lost > 0)


def _gc(options: argparse.Namespace) -> int:
    tier = DiskTier(_folder(options), ANY_SIZE)
    damaged = list(tier.damaged())
    tier.discard(damaged)
    freed_bytes = tier.compact()
    kept = tier.stats().num_entries
    tier.close()
    sys.stdout.write(
        f"{kept} chunks kept, {len(damaged)} damaged ones dropped, "
        f"{freed_bytes / 2**20:.1f} MB given back\n"
    )
    return 0


def _clear(options: argparse.Namespace) -> int:
    folder = _folder(options)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    clear(folder)
    sys.stdout.write(f"{size_bytes / 2**20:.1f} MB given back\n")
    return 0
