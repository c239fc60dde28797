"""Tokens of an answer -> text: however it is cut, it is the whole text up to the first stop."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvboost.engine.stream import TextReader

SPECIAL = -1


class ByteTokenizer:
    """A token is some bytes; those that are no text yet become U+FFFD, as in real tokenizers."""

    def __init__(self, words: list[bytes]) -> None:
        self._words = words
        self.most = 0  # tokens that were decoded at once

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        self.most = max(self.most, len(tokens))
        return b"".join(self._words[t] for t in tokens if t != SPECIAL).decode(errors="replace")


def read(tokenizer: object, tokens: list[int], stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """The pieces in which the text came, and whether a stop text ended it."""
    reader = TextReader(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(reader.feed(token))
        if reader.is_stopped:
            break
    pieces.append(reader.finish())
    return pieces, reader.is_stopped


def up_to_first_stop(text: str, stop: tuple[str, ...]) -> str:
    """By the rule: the stop text that is complete first ends the answer."""
    for end in range(len(text) + 1):
        found = [end - len(each) for each in stop if text[:end].endswith(each)]
        if found:
            return text[: min(found)]
    return text


texts = st.text(alphabet="aab e\né€😀", max_size=40)


@given(
    text=texts,
    cuts=st.lists(st.integers(0, 120), max_size=30),
    specials=st.lists(st.integers(0, 40), max_size=4),
    stop=st.lists(st.text(alphabet="aab e€😀", min_size=1, max_size=5), max_size=4).map(tuple),
)
def test_any_cut_of_any_bytes_gives_the_text_up_to_the_first_stop(
    text: str, cuts: list[int], specials: list[int], stop: tuple[str, ...]
) -> None:
    data = text.encode()
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    tokenizer = ByteTokenizer([data[a:b] for a, b in pairwise(borders)])
    tokens = list(range(len(tokenizer._words)))
    for place in specials:
        tokens.insert(place % (len(tokens) + 1), SPECIAL)
    pieces, is_stopped = read(tokenizer, tokens, stop)
    expected = up_to_first_stop(text, stop)
    assert "".join(pieces) == expected
    assert is_stopped == any(each in text for each in stop)


@given(data=st.binary(max_size=30), cuts=st.lists(st.integers(0, 30), max_size=12))
def test_bytes_that_are_no_text_read_as_a_whole_decode_reads_them(
    data: bytes, cuts: list[int]
) -> None:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    tokenizer = ByteTokenizer([data[a:b] for a, b in pairwise(borders)])
    pieces, _ = read(tokenizer, list(range(len(tokenizer._words))), ())
    assert "".join(pieces) == data.decode(errors="replace")


def test_no_part_of_a_stop_text_or_of_a_character_is_given_out() -> None:
    tokenizer = ByteTokenizer([b"ab", b"c", b"ab", b"\xe2\x82", b"\xac", b"abcd", b"x"])
    pieces, is_stopped = read(tokenizer, list(range(7)), ("abcd",))
    assert pieces == ["", "", "abc", "", "ab€", "", ""]
    assert is_stopped


def test_of_two_stop_texts_the_one_that_is_complete_first_counts() -> None:
    for words in ([b"xabcd"], [b"xabc", b"d"], [b"x", b"a", b"b", b"c", b"d"]):
        pieces, _ = read(ByteTokenizer(words), list(range(len(words))), ("abcd", "bc"))
        assert "".join(pieces) == "xa"


def test_what_is_held_back_comes_at_the_end_if_no_stop_text_follows() -> None:
    pieces, is_stopped = read(ByteTokenizer([b"go", b"<en", b"d"]), [0, 1, 2], ("<end>",))
    assert pieces == ["go", "", "", "<end"] and not is_stopped


def test_tokens_that_say_nothing_are_not_decoded_again_and_again() -> None:
    tokenizer = ByteTokenizer([b"a", b"b"])
    assert "".join(read(tokenizer, [0, *[SPECIAL] * 1000, 1], ())[0]) == "ab"
    assert tokenizer.most < 10


def test_bytes_that_never_become_a_character_are_given_out() -> None:
    tokenizer = ByteTokenizer([b"\x80"])
    assert "".join(read(tokenizer, [0] * 1000, ())[0]) == "\N{REPLACEMENT CHARACTER}" * 1000
    assert tokenizer.most < 200


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x ** 2  # ok\n\n\tdone",
        "Ein Märchen: „Es war einmal“ — 3 € = 12…",
        "日本語のテキスト と 한국어, عربى, हिन्दी",
        "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🤷🏽‍♀️ and plain a  b   c",
        "<|im_start|>user\nhello<|im_end|>\n",
    ],
)
def test_a_real_tokenizers_text_comes_piece_by_piece(smol: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smol)
    tokens = tokenizer(text).input_ids
    pieces, _ = read(tokenizer, tokens, ())
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) == whole
    assert all("�" not in piece for piece in pieces)
    middle = whole[len(whole) // 2 :][:3]
    pieces, is_stopped = read(tokenizer, tokens, (middle,))
    assert is_stopped and "".join(pieces) == whole[: whole.index(middle)]
