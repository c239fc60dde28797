"""Texts of the command line as token ids, the same for every command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost

SEPARATOR = "\n\n"  # between documents, and between them and the question


def add_raw(parser: argparse.ArgumentParser) -> None:
    """--raw."""
    parser.add_argument(
        "--raw",
        action="store_true",
        help="plain completion: no chat template (default: the model's template, if it has one)",
    )


def joined(documents: Sequence[str], question: str) -> str:
    """A prompt of documents and a question."""
    return SEPARATOR.join([*documents, question])


def prompt_tokens(
    engine: KVBoost, prompt: str, documents: Sequence[str] = (), *, raw: bool
) -> list[int]:
    """A prompt as one user message in the model's chat template; if `raw`, as plain text.

    Each of the `documents` in it is tokenized by itself: it has the same tokens in every prompt.
    """
    from kvboost.engine.texts import chat_tokens, tokens_of  # noqa: PLC0415  (loads numpy)

    if raw or engine.tokenizer.chat_template is None:
        return tokens_of(prompt, engine.tokenizer, documents)
    message = {"role": "user", "content": prompt}
    return chat_tokens([message], engine.tokenizer, documents, add_generation_prompt=True)


def tokens_before_question(engine: KVBoost, document: str, *, raw: bool) -> list[int]:
    """The tokens before the question in every prompt that begins with this document."""
    first, second = (
        prompt_tokens(engine, joined([document], question), [document], raw=raw)
        for question in ("A", "1")
    )
    both = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return [token for token, _ in both]
