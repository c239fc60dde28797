"""order="any": documents exchange their places so that a prompt continues a stored one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.core import MatchKind
from kvboost.engine.arrangement import MOST_TRIED, Arrangement, Piece
from kvboost.errors import ConfigError
from tiny_models import SUPPORTED, build

SEPARATOR = [3]


def pieces_of(*documents: Sequence[int]) -> list[Piece]:
    pieces = [Piece([1, 2])]
    for number, document in enumerate(documents):
        pieces += [Piece(list(document), number), Piece(SEPARATOR)]
    return [*pieces, Piece([9, 9])]


def arranged(
    pieces: list[Piece], stored: Sequence[Sequence[int]], elsewhere: Sequence[int] = ()
) -> tuple[list[int], tuple[int, ...]]:
    """By prompts that are stored, and first tokens of documents that are stored elsewhere."""

    def num_exact(tokens: list[int]) -> int:
        def common(prompt: Sequence[int]) -> int:
            pairs = enumerate(zip(prompt, tokens, strict=False))
            return next((n for n, (a, b) in pairs if a != b), min(len(prompt), len(tokens)))

        return max(map(common, stored), default=0)

    arrangement = Arrangement(num_exact, lambda tokens: tokens[0] in elsewhere)
    return arrangement(pieces), arrangement.order


A, B, C, D = ([base + n for n in range(5)] for base in (100, 200, 300, 400))
LEAD = [1, 2]


def test_the_longest_stored_prefix_comes_first() -> None:
    short = [*LEAD, *A, 3, *D]
    long = [*LEAD, *B, 3, *C, 3]
    tokens, order = arranged(pieces_of(A, B, C), [short, long])
    assert order == (1, 2, 0)
    assert tokens == [*LEAD, *B, 3, *C, 3, *A, 3, 9, 9]


def test_a_stored_prompt_with_a_document_less_is_continued() -> None:
    _, order = arranged(pieces_of(A, B, C), [[*LEAD, *C, 3, *A, 3]])
    assert order == (2, 0, 1)


def test_then_come_those_that_are_stored_elsewhere_and_new_ones_last() -> None:
    _, order = arranged(pieces_of(A, B, C, D), [[*LEAD, *C, 3]], elsewhere=[D[0]])
    assert order == (2, 3, 0, 1)


def test_where_nothing_is_stored_the_order_stays() -> None:
    tokens, order = arranged(pieces_of(A, B, C), [])
    assert order == (0, 1, 2)
    assert tokens == [*LEAD, *A, 3, *B, 3, *C, 3, 9, 9]


def test_a_document_that_is_there_twice_stays_there_twice() -> None:
    pieces = [Piece(LEAD), Piece(A, 0), Piece(B, 1), Piece(A, 0)]
    tokens, order = arranged(pieces, [[*LEAD, *B]])
    assert order == (1, 0, 0) and tokens == [*LEAD, *B, *A, *A]


def test_the_search_has_an_end() -> None:
    num_asked = 0

    def all_is_stored(tokens: list[int]) -> int:
        nonlocal num_asked
        num_asked += 1
        return len(tokens)

    documents = [[1000 + n] for n in range(12)]
    arrangement = Arrangement(all_is_stored, lambda _: True)
    assert len(arrangement(pieces_of(*documents))) == 2 + 2 * 12 + 2
    assert sorted(arrangement.order) == list(range(12))
    assert num_asked <= MOST_TRIED


def text(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


DOCUMENTS = [text(words(50, seed)) for seed in range(20)]


def prompt_of(documents: Sequence[str], question: int) -> str:
    return " 7 8 ".join(["5 6", *documents, text(words(8, 900 + question))])


@pytest.mark.tiny
def test_an_arranged_prompt_is_exact_and_says_its_order() -> None:
    with KVBoost(build(*SUPPORTED["llama"]), WordTokenizer(), chunk_size=16) as engine:
        first = DOCUMENTS[:3]
        engine.generate(prompt_of(first, 0), 1, documents=first)
        other = [DOCUMENTS[2], DOCUMENTS[3], DOCUMENTS[0], DOCUMENTS[1]]
        given = engine.explain(prompt_of(other, 1), documents=other)
        result = engine.generate(prompt_of(other, 1), 6, documents=other, order="any")
        assert result.document_order == (2, 3, 0, 1)
        assert given.tokens(MatchKind.EXACT) < 10
        assert result.reuse.tokens(MatchKind.EXACT) > 150
        in_order = [other[number] for number in result.document_order]
        plain = engine.generate(prompt_of(in_order, 1), 6, documents=in_order, reuse="off")
        assert plain.token_ids == result.token_ids
        assert plain.prompt_tokens == result.prompt_tokens
        assert plain.document_order == ()
        with pytest.raises(ConfigError, match="expected 'given' or 'any'"):
            engine.generate("5 6", 1, order="all")  # type: ignore[arg-type]


@pytest.mark.tiny
def test_skewed_traffic_has_twice_the_exact_reuse() -> None:
    chance = random.Random(0)
    weights = [1 / (1 + rank) for rank in range(len(DOCUMENTS))]
    requests = []
    while len(requests) < 60:
        chosen = list(dict.fromkeys(chance.choices(DOCUMENTS, weights, k=8)))[:4]
        if len(chosen) == 4:
            requests.append(chosen)
    exact = {}
    for order in ("given", "any"):
        with KVBoost(build(*SUPPORTED["llama"]), WordTokenizer(), chunk_size=16) as engine:
            results = [
                engine.generate(prompt_of(each, n), 1, documents=each, order=order)  # type: ignore[arg-type]
                for n, each in enumerate(requests)
            ]
            exact[order] = sum(result.reuse.tokens(MatchKind.EXACT) for result in results)
    assert exact["any"] > 1.9 * exact["given"], exact
