"""`kvboost generate`: answers a prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from kvboost.cli import flags
from kvboost.cli.loading import loaded, read
from kvboost.core import counted, percent

if TYPE_CHECKING:
    from kvboost.engine.results import GenerationResult
    from kvboost.engine.stream import TextStream

MAX_NEW_TOKENS = 64


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Answers a prompt: the model goes on where it ends, without a chat template. What was "
        "computed is kept where --disk-cache-dir or --cache-url say, so that another call finds "
        "it. The text goes to standard output; what was reused, and times, to standard error.",
        "kvboost generate 'The capital of France is' --model FOLDER --max-new-tokens 8",
        "kvboost generate --file prompt.txt --model FOLDER --disk-cache-dir kv-cache",
        "kvboost generate 'Question: ...' --document a.txt --document b.txt --reuse auto "
        "--model FOLDER",
    )
    parser.set_defaults(run=_generate, fail=parser.error)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text (default: what comes on standard input)"
    )
    prompt.add_argument("--file", metavar="FILE", help="file with the prompt; - for standard input")
    parser.add_argument(
        "--document",
        action="append",
        default=[],
        metavar="FILE",
        help="file whose text goes before the prompt, with a blank line between; may be repeated",
    )
    flags.add_model(parser)
    flags.add_answer(parser, MAX_NEW_TOKENS)
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print the text as it comes (default: on a terminal)",
    )
    flags.add_reuse(parser)
    flags.add_tiers(parser)
    flags.add_json(parser)


def _generate(options: argparse.Namespace) -> int:
    documents = [read(name) for name in options.document]
    prompt = "\n\n".join([*documents, _prompt(options)])
    with loaded(options) as engine:
        arguments = {"documents": documents, **flags.sampling(options)}
        if options.json:
            result = engine.generate(prompt, **arguments)
            sys.stdout.write(json.dumps(as_dict(result)) + "\n")
        elif sys.stdout.isatty() if options.stream is None else options.stream:
            result = print_stream(engine.stream(prompt, **arguments))
        else:
            result = engine.generate(prompt, **arguments)
            sys.stdout.write(f"{result.output_text}\n")
        sys.stdout.flush()
        sys.stderr.write(f"{line(result)}\n")
    return 0


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        return str(options.prompt)
    if options.file is None and sys.stdin.isatty():
        options.fail("a prompt is missing: give it as an argument, or a file with --file")
    return read(options.file or "-")


def print_stream(stream: TextStream) -> GenerationResult:
    """Print the output as it is generated, and a line end."""
    with stream:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    assert stream.result is not None
    return stream.result


def line(result: GenerationResult) -> str:
    """What was reused and how long it took."""
    return (
        f"{percent(result.cached_tokens, result.prompt_tokens)} of "
        f"{counted(result.prompt_tokens, 'prompt token')} reused; "
        f"first token after {result.ttft_ms:.0f} ms, {counted(len(result.token_ids), 'token')} in "
        f"{result.total_ms:.0f} ms"
    )


def as_dict(result: GenerationResult) -> dict[str, Any]:
    """An answer in the types of JSON."""
    from kvboost.core import MatchKind  # noqa: PLC0415

    return {
        "text": result.output_text,
        "new_tokens": len(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        **{f"{kind.value}_tokens": result.reuse.tokens(kind) for kind in MatchKind},
        "repaired_tokens": result.reuse.repaired_tokens,
        "ttft_ms": result.ttft_ms,
        "total_ms": result.total_ms,
        "note": result.reuse.note,
    }
