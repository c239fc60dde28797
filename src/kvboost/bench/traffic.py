"""Mixed traffic: conversations of the Mooncake trace, made small enough for one machine.

The trace has a line for each request: when it came, how long it was, and numbers of its blocks of
512 tokens, equal where texts were equal. Each block becomes a short text of its own.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvboost.bench.texts import Dealer
from kvboost.errors import ConfigError

FILE = "conversation_trace.jsonl"
BLOCK_TOKENS = 48  # for each block of 512
MOST_BLOCKS = 30
NUM_REQUESTS = 16
NEW_TOKENS = 8
MEAN_GAP_S = 1.5  # between arrivals, to which the trace's times are scaled


def requests(data: Path, tokenizer: Any, seed: int) -> list[dict[str, Any]]:
    """Requests with the times at which they come, as workers take them."""
    if not (data / FILE).is_file():
        raise ConfigError(f"{data} has no {FILE}: leave out --data, or give its folder")
    rows = [json.loads(line) for line in (data / FILE).read_text().splitlines()]
    taken = _conversations(rows, random.Random(seed))
    first, last = taken[0]["timestamp"], taken[-1]["timestamp"]
    scale = MEAN_GAP_S * (len(taken) - 1) / max(1, last - first)
    blocks: dict[int, list[int]] = {}
    dealer = Dealer(seed, lambda text: len(tokenizer(text, add_special_tokens=False).input_ids))
    for number in dict.fromkeys(each for row in taken for each in row["hash_ids"]):
        text = dealer.prose(BLOCK_TOKENS)
        blocks[number] = tokenizer(text, add_special_tokens=False).input_ids[:BLOCK_TOKENS]
    return [
        {
            "at_s": round(scale * (row["timestamp"] - first), 3),
            "tokens": [token for number in row["hash_ids"] for token in blocks[number]],
            "num_new": NEW_TOKENS,
        }
        for row in taken
    ]


def _conversations(rows: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    """Requests of whole conversations, drawn by chance: they share what they share in the trace."""
    by_beginning: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if len(row["hash_ids"]) > 1:
            by_beginning[row["hash_ids"][1]].append(row)  # the first block is everyone's
    drawn: list[dict[str, Any]] = []
    for conversation in chance.sample(list(by_beginning.values()), len(by_beginning)):
        if len(drawn) >= NUM_REQUESTS:
            break
        drawn += [row for row in conversation if len(row["hash_ids"]) <= MOST_BLOCKS]
    return sorted(drawn, key=lambda row: int(row["timestamp"]))[:NUM_REQUESTS]
