"""Tokens of an answer to its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost.engine.stream import TextReader


class ByteTokenizer:
    """A token for each byte; 256 and above say nothing. Keeps how many it had to decode at most."""

    most = 0

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        self.most = max(self.most, len(tokens))
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def test_characters_of_several_tokens_come_whole() -> None:
    reader = TextReader(ByteTokenizer(), ())
    pieces = [reader.feed(byte) for byte in "aé€😀".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀"]


def test_tokens_that_say_nothing_are_not_decoded_again_and_again() -> None:
    tokenizer = ByteTokenizer()
    reader = TextReader(tokenizer, ())
    tokens = [ord("a"), *[300] * 1000, ord("b")]
    assert "".join(map(reader.feed, tokens)) + reader.finish() == "ab"
    assert tokenizer.most < 10


def test_bytes_that_never_become_a_character_are_given_out() -> None:
    tokenizer = ByteTokenizer()
    reader = TextReader(tokenizer, ())
    text = "".join(reader.feed(0x80) for _ in range(1000)) + reader.finish()
    assert text == "\N{REPLACEMENT CHARACTER}" * 1000
    assert tokenizer.most < 200
