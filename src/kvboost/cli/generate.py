"""`kvboost generate`: answers a prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from kvboost.cli import flags, prompts
from kvboost.cli.loading import loaded, read, read_document
from kvboost.core import counted, percent

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost
    from kvboost.engine.results import GenerationResult
    from kvboost.engine.stream import TextStream

MAX_NEW_TOKENS = 64


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Answers a prompt. Documents and prompt are one user message in the model's chat template; "
        "with --raw, or if the model has no template, the model continues them as plain text. "
        "With --disk-cache-dir or --cache-url, later calls reuse the K/V computed here. The "
        "answer goes to standard output; reuse and timings go to standard error.",
        "kvboost generate 'What is the capital of France?' --model FOLDER",
        "kvboost generate 'Who may use a boat?' --document rules.txt --model FOLDER "
        "--disk-cache-dir kv-cache",
        "kvboost generate --raw 'The capital of France is' --model FOLDER --max-new-tokens 8",
    )
    parser.set_defaults(run=_generate)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text of the prompt (default: standard input)"
    )
    prompt.add_argument("--file", metavar="FILE", help="file with the prompt; - for standard input")
    flags.add_files(parser, "--document", "file to put before the prompt")
    prompts.add_raw(parser)
    flags.add_model(parser)
    flags.add_answer(parser, MAX_NEW_TOKENS)
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print tokens as they are generated (default: on a terminal)",
    )
    flags.add_reuse(parser)
    flags.add_tiers(parser)
    flags.add_json(parser)


def _generate(options: argparse.Namespace) -> int:
    documents = [read_document(name) for name in options.document]
    prompt = prompts.joined(documents, _question(options))
    with loaded(options) as engine:
        tokens = prompts.prompt_tokens(engine, prompt, documents, raw=options.raw)
        arguments = flags.sampling(options)
        if not options.json and (sys.stdout.isatty() if options.stream is None else options.stream):
            result = print_stream(engine.stream(tokens, **arguments))
        else:
            result = engine.generate(tokens, **arguments)
            text = json.dumps(as_dict(result)) if options.json else result.output_text
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        if not result.output_text:
            sys.stderr.write(f"{_why_empty(engine, result, raw=options.raw)}\n")
        sys.stderr.write(f"{line(result)}\n")
    return 0


def _why_empty(engine: KVBoost, result: GenerationResult, *, raw: bool) -> str:
    ended = engine.tokenizer.decode(result.token_ids[:1])
    has_template = engine.tokenizer.chat_template is not None
    hint = "; without --raw it gets its chat template" if raw and has_template else ""
    return f"the answer is empty: the model ended it with its first token, {ended!r}{hint}"


def _question(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        return str(options.prompt)
    if options.file is None and sys.stdin.isatty():
        options.fail("no prompt: pass it as an argument, with --file, or on standard input")
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
    """Reuse and timings of an answer."""
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
        "finish_reason": result.finish_reason,
        "new_tokens": len(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        **{f"{kind.value}_tokens": result.reuse.tokens(kind) for kind in MatchKind},
        "repaired_tokens": result.reuse.repaired_tokens,
        "ttft_ms": result.ttft_ms,
        "total_ms": result.total_ms,
        "note": result.reuse.note,
    }
