"""Prompts, chats and documents -> token ids."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvboost.engine.arrangement import Arrangement, Piece
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Prompt: TypeAlias = str | Sequence[int]
    Messages: TypeAlias = Sequence[Mapping[str, Any]]

# Documents that are warmed for approximate reuse are prefilled after this text. Prefilled alone,
# their first tokens would act as the start of a prompt, which does most harm when they are moved
# (docs/concepts/exact-and-moved.md has the figures).
PREFACE = """\
The town lies where two rivers meet. In spring the water rises and the lower meadows are flooded,
and for some weeks the farmers use boats to reach their barns. The market is held on Wednesdays
and Saturdays. People come from the villages around it to sell bread, cheese, wool and tools, and
to hear the news. A small museum shows maps, coins and letters from the last century. The school
was rebuilt after the fire; it now has a library with a few thousand books, which anyone may
borrow. Trains stop twice a day on their way to the coast.

Notes for readers. Each page of this collection stands for itself. A page may describe a place, a
person, a law, a tool or a piece of code, and it may be long or short. Nothing on one page has to
agree with the next. Dates are given where they are known. Names are spelled as in the source.
Whoever looks for an answer should read the page that speaks of it, and check it against others.

"""


MOST_OCCURRENCES = 4096  # of documents in a prompt: each is tokenized by itself


def tokens_of(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str] = (),
    arrangement: Arrangement | None = None,
) -> list[int]:
    """Token ids of a prompt; each of `documents` in it is tokenized by itself.

    Raises:
        TypeError: the prompt is neither text nor token ids.
        ConfigError: the prompt is empty or lacks one of the documents.
    """
    if isinstance(prompt, str):
        tokens = _tokens_of_text(prompt, tokenizer, documents, arrangement)
    else:
        tokens = _checked_ids(prompt)
        if documents:
            raise ConfigError("documents=... requires a text prompt, not token ids")
    if not tokens:
        raise ConfigError("the prompt is empty")
    return tokens


def _checked_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
        raise TypeError(f"the prompt is a {type(prompt).__name__}: expected text or token ids")
    tokens = list(prompt)
    if tokens and isinstance(tokens[0], Mapping):
        raise TypeError("the prompt is a list of messages: call chat(messages)")
    if tokens and isinstance(tokens[0], str):
        raise TypeError(
            "the prompt is a list of texts: call generate_batch(prompts), or pass one text per call"
        )
    return tokens


def check_ids(tokens: Sequence[int], num_known: int, what: str) -> None:
    """Refuse ids without a row in the input embedding: on a GPU they would end the process.

    Raises:
        ConfigError: a token is no whole number, or the model does not know it.
    """
    try:  # 131,072 tokens in 2 ms; numpy alone takes 7
        if np.frombuffer(array("I", tokens), np.uintc).max(initial=0) < num_known:
            return
    except (TypeError, OverflowError):  # not whole, negative, or huge
        pass
    for place, token in enumerate(tokens):
        try:
            is_known = 0 <= operator.index(token) < num_known
        except TypeError:
            is_known = False
        if not is_known:
            known = f"the model knows 0 to {num_known - 1}"
            raise ConfigError(f"token {place} of {what} is {token!r:.40}: {known}")


def chat_tokens(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str] = (),
    arrangement: Arrangement | None = None,
    **arguments: Any,
) -> list[int]:
    """Token ids of a conversation in the model's chat template."""
    if documents:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
        return _tokens_of_text(text, tokenizer, documents, arrangement, add_special_tokens=False)
    encoded = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, **arguments
    )
    return list(encoded["input_ids"])


def texts_to_warm(
    content: Prompt | Sequence[str] | Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    anywhere: bool,
) -> list[list[int]]:
    """Token ids of each text to warm; without a tokenizer's BOS if it may be at any position."""
    special = {"add_special_tokens": False} if anywhere else {}
    if len(content) == 0:
        return []
    if not isinstance(content, str):
        if isinstance(content[0], Mapping):
            return [chat_tokens(content, tokenizer)]  # type: ignore[arg-type]
        if isinstance(content[0], str):
            return [tokenizer(text, **special).input_ids for text in content]
        return [tokens_of(content, tokenizer)]  # type: ignore[arg-type]
    return [tokenizer(content, **special).input_ids]


def _tokens_of_text(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    arrangement: Arrangement | None = None,
    **arguments: Any,
) -> list[int]:
    pieces: list[Piece] = []
    arrangement = arrangement if documents else None
    for piece, document in _cut_at(text, documents):
        if not pieces and arrangement is not None:  # special tokens come before any document
            pieces.append(Piece(tokenizer("", **arguments).input_ids))
        more = {"add_special_tokens": False} if pieces else arguments
        pieces.append(Piece(tokenizer(piece, **more).input_ids, document))
    if arrangement is not None:
        return arrangement(pieces)
    return [token for piece in pieces for token in piece.tokens]


def _cut_at(text: str, documents: Sequence[str]) -> list[tuple[str, int | None]]:
    """The text cut at its documents: pieces, each with its document's number or None."""
    if isinstance(documents, str):
        raise ConfigError("documents is one text: expected a list of texts")
    found: list[tuple[int, int, int]] = []
    for count, document in enumerate(documents):
        at = text.find(document)
        if not document or at < 0:
            fault = "is not part of the prompt" if document else "is empty"
            raise ConfigError(f"documents[{count}] {fault}")
        while at >= 0:
            if len(found) == MOST_OCCURRENCES:
                raise ConfigError(
                    f"documents occur more than {MOST_OCCURRENCES} times in the prompt"
                )
            found.append((at, at + len(document), count))
            at = text.find(document, at + len(document))
    pieces: list[tuple[str, int | None]] = []
    cursor = 0
    for start, stop, count in sorted(found, key=lambda each: (each[0], -each[1])):  # longest first
        if start >= cursor:
            pieces += [(text[cursor:start], None), (text[start:stop], count)]
            cursor = stop
    return [each for each in (*pieces, (text[cursor:], None)) if each[0]]
