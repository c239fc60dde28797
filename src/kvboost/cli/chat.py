"""`kvboost chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from kvboost.cli import flags
from kvboost.cli.generate import as_dict, line, print_stream
from kvboost.cli.loading import loaded
from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost
    from kvboost.engine.results import GenerationResult

MAX_NEW_TOKENS = 512
LEAVE = "/exit"


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Talks with a model in its chat template. Each line of standard input is a message; "
        f"{LEAVE}, end of input (Ctrl+D) or Ctrl+C leaves. After each answer, standard error "
        "says how much of the conversation was reused.",
        "kvboost chat --model FOLDER --system 'You answer in one sentence.'",
        "echo 'What is the capital of France?' | kvboost chat --model FOLDER --json",
    )
    parser.set_defaults(run=_chat)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    flags.add_model(parser)
    flags.add_answer(parser, MAX_NEW_TOKENS)
    flags.add_reuse(parser)
    flags.add_tiers(parser)
    flags.add_json(parser, "print one JSON object for each answer")


def _chat(options: argparse.Namespace) -> int:
    messages = [{"role": "system", "content": options.system}] if options.system else []
    with loaded(options) as engine:
        if engine.tokenizer.chat_template is None:
            raise KVBoostError(
                f"model {options.model!r} has no chat template: use `kvboost generate`"
            )
        try:
            for text in _lines():
                messages.append({"role": "user", "content": text})
                answer = _answer(engine, messages, options)
                messages.append({"role": "assistant", "content": answer})
        except KeyboardInterrupt:
            sys.stderr.write("\n")
    return 0


def _answer(engine: KVBoost, messages: list[dict[str, str]], options: argparse.Namespace) -> str:
    arguments = flags.sampling(options)
    if options.json:
        result: GenerationResult = engine.chat(messages, **arguments)
        sys.stdout.write(json.dumps(as_dict(result)) + "\n")
        sys.stdout.flush()
    else:
        result = print_stream(engine.chat(messages, stream=True, **arguments))
    sys.stderr.write(f"[{line(result)}]\n")
    return result.output_text


def _lines() -> Iterator[str]:
    """Messages of the user; on a terminal with a prompt and line editing."""
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415  (`input` uses it; not on every system)
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    with suppress(EOFError):
        while (said := input(prompt).strip()) != LEAVE:
            if said:
                yield said
