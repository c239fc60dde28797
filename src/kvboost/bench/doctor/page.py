"""What was found, on a terminal or as JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median

from kvboost.bench.doctor.advice import Setting
from kvboost.bench.doctor.diagnosis import (
    Finding,
    break_even,
    exact_shares,
    is_preliminary,
    moved_shares,
    rate,
    tier_shares,
)
from kvboost.bench.doctor.facts import Visit
from kvboost.config import MIB

COLOURS = {"good": 32, "note": 36, "warning": 33}  # of a terminal
LEVEL_WIDTH = max(map(len, COLOURS))

Table = list[tuple[str, ...]]
"""Rows of cells, the first one the header."""


def print_json(visit: Visit, findings: Sequence[Finding], settings: Sequence[Setting]) -> None:
    """Everything, with the times of every round."""
    page = {
        "is_certified": not visit.model.refusal,
        "measured": asdict(visit),
        "pays_from_tokens": pays_from(visit),
        "findings": [asdict(each) for each in findings],
        "is_preliminary": bool(settings) and is_preliminary(visit),
        "settings": [asdict(each) for each in settings],
    }
    sys.stdout.write(json.dumps(page, indent=2) + "\n")


def print_page(
    given: Mapping[str, str],
    visit: Visit,
    findings: Sequence[Finding],
    settings: Sequence[Setting],
) -> None:
    """Print tables, findings and settings; in colour on a terminal.

    `given` holds the arguments the model was loaded with, by name.
    """
    lines: list[str] = []
    for table in [] if visit.model.refusal else [lengths_table(visit), tiers_table(visit)]:
        lines += [*aligned(table), ""]
    lines += [f"{coloured(each.level)}  {each.text}" for each in findings]
    if settings:
        told = ", preliminary: see the warnings" if is_preliminary(visit) else ""
        lines += ["", f"Recommended{told}:"]
        lines += [f"  {each.name}={shown(each)}: {each.why}" for each in settings]
        lines += ["", *_commands(given, settings)]
    sys.stdout.write("\n".join(lines) + "\n")


def aligned(table: Table) -> list[str]:
    """Lines whose cells are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]


def coloured(level: str) -> str:
    """The level of a finding; in its colour on a terminal."""
    text = f"{level.upper():<{LEVEL_WIDTH}}"
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[{COLOURS[level]}m{text}\x1b[0m" if has_colours else text


def pays_from(visit: Visit) -> dict[str, int | None]:
    """Break-even lengths in tokens by what is reused; None: not at any measured length."""
    if visit.model.refusal:
        return {}
    found = {"exact": break_even(exact_shares(visit)), "moved": break_even(moved_shares(visit))}
    below = (tier for tier in visit.tiers if tier.name != "memory" and not tier.problem)
    return found | {tier.name: break_even(tier_shares(visit, tier)) for tier in below}


def lengths_table(visit: Visit) -> Table:
    """Time to the first token by length, medians of the rounds."""
    rows: Table = [("text tokens", "no reuse", "new text", "same beginning", "moved", "rounds")]
    for each in visit.readings:
        moved = f"{median(each.moved_ms):.0f} ms" if median(each.is_moved) > 0.5 else "computed"
        rows.append(
            (
                str(each.num_tokens),
                f"{median(each.full_ms):.0f} ms",
                f"{median(each.cold_ms):.0f} ms",
                f"{median(each.exact_ms):.0f} ms",
                moved,
                str(len(each.full_ms)),
            )
        )
    return rows


def tiers_table(visit: Visit) -> Table:
    """Bandwidths of the tiers that work."""
    rows: Table = [("tier", "write", "read", "answers in", "1000 tokens in")]
    for tier in visit.tiers:
        if tier.problem:
            continue
        rows.append(
            (
                tier.name,
                rate(tier.put_bytes_per_s),
                rate(tier.get_bytes_per_s),
                f"{tier.answer_ms:.2f} ms",
                f"{tier.load_ms(1000 * visit.model.bytes_per_token):.0f} ms",
            )
        )
    return rows


def _commands(given: Mapping[str, str], settings: Sequence[Setting]) -> list[str]:
    """The settings as they are written in Python and on a command line."""
    options = [each for each in settings if not each.is_variable]
    loaded = [f"{name}={value!r}" for name, value in given.items() if name != "model"]
    arguments = [repr(given["model"]), *loaded, *(f"{o.name}={o.value!r}" for o in options)]
    variables = [f"{each.name}={each.value}" for each in settings if each.is_variable]
    flags = [_flag(name, value) for name, value in given.items()]
    flags += [_flag(each.name, "" if each.value is True else shown(each)) for each in options]
    return [
        f"KVBoost.from_pretrained({', '.join(arguments)})",
        " ".join([*variables, "kvboost serve", *flags]),
    ]


def _flag(name: str, value: str) -> str:
    flag = "--" + name.replace("_", "-")
    return f"{flag} {shlex.quote(value)}" if value else flag


def shown(setting: Setting) -> str:
    """A value as it is written; sizes in MiB."""
    if setting.name.endswith("_bytes"):
        return f"{int(setting.value) // MIB}MiB"
    return str(setting.value)
