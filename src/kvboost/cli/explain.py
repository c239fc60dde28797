"""`kvboost explain`: which spans of a prompt are reused, in colours."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvboost.cli import flags
from kvboost.cli.loading import loaded, read, read_document
from kvboost.cli.prompts import add_raw, prompt_tokens
from kvboost.cli.warm import warm_text
from kvboost.core import counted, percent
from kvboost.errors import KVBoostError, missing_packages

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from kvboost.engine.results import ReuseReport

COLOURS = {"exact": "green", "moved": "yellow", "miss": "dim"}
MEANINGS = {
    "exact": "stored, computed after the same prefix",
    "moved": "stored, computed after another prefix",
    "miss": "computed",
}
LONGEST_SHOWN = 400  # characters of a span in the terminal


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Prefills the --seen prompts, then shows which spans of PROMPT are exact, moved or missed, "
        "and why. With --disk-cache-dir or --cache-url, K/V stored there counts as well. Prompts "
        "are tokenized as by `kvboost generate`.",
        "kvboost explain prompt.txt --seen earlier.txt --model FOLDER",
        "kvboost explain prompt.txt --document handbook.md --reuse auto --model FOLDER --json",
    )
    parser.set_defaults(run=_explain)
    parser.add_argument(
        "prompt", metavar="PROMPT", help="file with the prompt; - for standard input"
    )
    flags.add_files(parser, "--seen", "file with an earlier prompt")
    flags.add_files(parser, "--document", "file with a document to warm")
    parser.add_argument(
        "--chunk-size", type=int, default=128, metavar="N", help="tokens in a chunk (default: 128)"
    )
    add_raw(parser)
    flags.add_model(parser)
    flags.add_reuse(parser)
    flags.add_tiers(parser)
    flags.add_json(parser)


def _explain(options: argparse.Namespace) -> int:
    if not (options.json or find_spec("rich")):
        raise KVBoostError(f"{missing_packages('explain', 'rich')}; or use --json")
    prompt, *seen = [read(name) for name in (options.prompt, *options.seen)]
    documents = [read_document(name) for name in options.document]
    with loaded(options) as engine:

        def tokens_of(text: str) -> list[int]:
            inside = [each for each in documents if each in text]
            return prompt_tokens(engine, text, inside, raw=options.raw)

        for text in documents:
            warm_text(engine, text, reuse=options.reuse, raw=options.raw)
        for text in seen:
            engine.generate(tokens_of(text), max_new_tokens=1)
        tokens = tokens_of(prompt)
        report = engine.explain(tokens)
        if options.json:
            sys.stdout.write(json.dumps(as_dict(report), indent=2) + "\n")
        else:
            from rich.console import Console  # noqa: PLC0415  (an extra)

            draw(report, tokens, engine.tokenizer, Console())
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


def draw(
    report: ReuseReport,
    tokens: list[int],
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
) -> None:
    """Print the prompt with its spans in colours (in a pipe: `[kind]`), then a table of them."""
    from rich.table import Table  # noqa: PLC0415  (an extra)
    from rich.text import Text  # noqa: PLC0415

    text = Text()
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
