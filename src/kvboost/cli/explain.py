"""`kvboost explain`: what of a prompt is reused, in colours."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from kvboost.cli import flags
from kvboost.cli.loading import loaded, read
from kvboost.core import counted, percent
from kvboost.errors import KVBoostError, missing_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.results import ReuseReport

COLOURS = {"exact": "green", "moved": "yellow", "miss": "dim"}
MEANINGS = {
    "exact": "from the store, with the same text before it",
    "moved": "from the store, computed with other text before it",
    "miss": "computed",
}
LONGEST_SHOWN = 400  # characters of a span in the terminal


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Reads the --seen prompts, then shows what of PROMPT is reused, moved or missed, and why. "
        "With --disk-cache-dir or --cache-url, what is stored there counts as well.",
        "kvboost explain prompt.txt --seen earlier.txt --model FOLDER",
        "kvboost explain prompt.txt --document handbook.md --reuse auto --model FOLDER --json",
    )
    parser.set_defaults(run=_explain)
    parser.add_argument(
        "prompt", metavar="PROMPT", help="file with the prompt; - for standard input"
    )
    parser.add_argument(
        "--seen",
        action="append",
        default=[],
        metavar="FILE",
        help="file with an earlier prompt; may be repeated",
    )
    parser.add_argument(
        "--document",
        action="append",
        default=[],
        metavar="FILE",
        help="file with a document to warm; may be repeated",
    )
    parser.add_argument(
        "--chunk-size", type=int, default=128, metavar="N", help="tokens in a chunk (default: 128)"
    )
    flags.add_model(parser)
    flags.add_reuse(parser)
    flags.add_tiers(parser)
    flags.add_json(parser)


def _explain(options: argparse.Namespace) -> int:
    prompt = read(options.prompt)
    seen = [read(name) for name in options.seen]
    documents = [read(name) for name in options.document]
    with loaded(options, chunk_size=options.chunk_size) as engine:
        if documents:
            engine.warm(documents)
        for text in seen:
            engine.generate(text, max_new_tokens=1)
        report = engine.explain(prompt)
        tokens = engine.tokenizer(prompt).input_ids
        if options.json:
            sys.stdout.write(json.dumps(as_dict(report), indent=2) + "\n")
        else:
            draw(report, tokens, engine.tokenizer)
    return 0


def as_dict(report: ReuseReport) -> dict[str, object]:
    """A report in the types of JSON."""
    fields = dataclasses.asdict(report)
    fields["spans"] = [
        {
            "start": each.span.start,
            "stop": each.span.stop,
            "kind": each.kind.value,
            "reason": each.reason,
        }
        for each in report.spans
    ]
    return fields


def draw(report: ReuseReport, tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the prompt with its spans in colours (in a pipe: `[kind]`), then a table of them.

    Raises:
        KVBoostError: `rich` is not installed.
    """
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError as error:
        raise KVBoostError(f"{missing_extra('this', 'cli')}; or use --json") from error
    console, text = Console(), Text()
    table = Table("tokens", "kind", "reason", box=None, header_style="bold")
    for each in report.spans:
        kind, span = each.kind.value, each.span
        said = tokenizer.decode(tokens[span.start : span.stop])
        if len(said) > LONGEST_SHOWN:
            half = LONGEST_SHOWN // 2
            said = f"{said[:half]} [...] {said[-half:]}"
        text.append(said if console.color_system else f"[{kind}] {said}\n", style=COLOURS[kind])
        place = f"{span.start}-{span.stop}"
        table.add_row(place, Text(kind, style=COLOURS[kind]), each.reason or MEANINGS[kind])
    console.print(text)
    console.print()
    console.print(table)
    console.print()
    total = max(1, len(tokens))
    shares = [
        f"{kind} {percent(sum(len(s.span) for s in report.spans if s.kind.value == kind), total)}"
        for kind in COLOURS
    ]
    repaired = f", {report.repaired_tokens} moved tokens computed again"
    console.print(
        f"{counted(total, 'token')}: {', '.join(shares)}"
        f"{repaired if report.repaired_tokens else ''}"
    )
    if report.predicted_ms is not None and report.full_ms is not None:
        console.print(
            f"expected prefill: {report.predicted_ms:.0f} ms, without reuse {report.full_ms:.0f} ms"
        )
    if report.note:
        console.print(f"note: {report.note}")
