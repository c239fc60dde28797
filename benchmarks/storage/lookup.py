"""How long does lookup take in a million chunks, and what does the index weigh?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common.measure import Row, median_ms
from kvboost.bench.clock import seconds
from kvboost.core import Entry, Provenance
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.lookup import find, find_moved
from kvboost.tiers import anchors
from kvboost.tiers.index import ChunkIndex

SPACE = namespace(b"benchmark", "", None)
CHUNK, DOCUMENT = 128, 1280


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=32_768)


def run(options: argparse.Namespace) -> Iterator[Row]:
    index, documents = ChunkIndex(), []
    chance = np.random.default_rng(0)
    for number in range(options.chunks * CHUNK // DOCUMENT):
        tokens = chance.integers(0, 150_000, DOCUMENT).astype("<u4")
        if number % (options.chunks * CHUNK // DOCUMENT // 50) == 0:
            documents.append(tokens)
        add(index, tokens)
    for kind, prompt in _prompts(documents, options.tokens, chance).items():
        taken = [seconds(lambda: _look(prompt, index)) for _ in range(options.rounds)]  # noqa: B023
        yield {
            "prompt": kind,
            "tokens": len(prompt),
            "chunks": len(index),
            "found": _look(prompt, index),
            "median_ms": median_ms(taken),
            "index_bytes_per_chunk": round(index.size_bytes / len(index), 1),
        }


def _look(prompt: list[int], index: ChunkIndex) -> int:
    """Tokens found: chunks and keys made, the exact prefix, then anything anywhere."""
    chunks = split(prompt, CHUNK)
    plan = find(chunks, derive(chunks, SPACE), index)
    return find_moved(plan, chunks, index, SPACE).num_reused


def add(index: ChunkIndex, tokens: Any) -> None:
    """Index a prompt as the engine would, without K/V."""
    chunks = split(tokens.tolist(), CHUNK)
    places, hashes = anchors.pick(tokens, anchors.salt(SPACE))
    owned: list[list[tuple[int, int]]] = [[] for _ in chunks]
    for place, anchor in zip(places.tolist(), hashes.tolist(), strict=True):
        owned[place // CHUNK].append((place % CHUNK, anchor))
    for chunk, key, found in zip(chunks, derive(chunks, SPACE), owned, strict=True):
        start = chunk.span.start
        exact = Provenance.EXACT
        entry = Entry(chunk.tokens, exact, key.prefix, None, key.parent, start, SPACE)
        index.add(entry, found)


def _prompts(documents: list[Any], num_tokens: int, chance: Any) -> dict[str, list[int]]:
    """All new; all seen before at other places; a seen prefix and then both by turns."""
    new = chance.integers(0, 150_000, num_tokens).tolist()
    seen: list[int] = []
    for document in documents:
        seen += [1, 2, 3, *document.tolist()[17:]]
    mixed = documents[0].tolist()
    for number, document in enumerate(documents[1:]):
        mixed += document.tolist()[5:] if number % 2 else new[number * 1000 :][:1000]
    return {"new": new, "moved": seen[:num_tokens], "mixed": mixed[:num_tokens]}
