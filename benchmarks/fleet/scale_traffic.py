"""Traffic of any size with the statistics of a trace: its conversations, drawn again and again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvboost.analyze.logs import LoggedRequest

BLOCK_TOKENS = 512  # in Mooncake's traces
POPULAR_BLOCKS = 16  # of a beginning that many conversations can be given in common
Names = npt.NDArray[np.uint64]


class Traffic:
    """Whole conversations of a trace with texts of their own.

    Requests are one conversation if their second blocks are equal: the first is everybody's, and
    stays so. Turns keep their distances and lengths. What a conversation had in common with others
    beyond the first block is lost, and one that the trace's ends cut stays cut.
    """

    def __init__(self, trace: Path) -> None:
        by_beginning: dict[int, list[tuple[float, int, list[int]]]] = defaultdict(list)
        with trace.open() as lines:
            for line in lines:
                row = json.loads(line)
                ids = row["hash_ids"]
                turn = (row["timestamp"] / 1e3, row["input_length"], ids)
                by_beginning[ids[min(1, len(ids) - 1)]].append(turn)
        turns = [turn for conversation in by_beginning.values() for turn in conversation]
        self.num_turns = np.array([len(each) for each in by_beginning.values()])
        self._first_turn = np.cumsum(self.num_turns) - self.num_turns
        begins = np.array([each[0][0] for each in by_beginning.values()])
        self._after_s = np.array([turn[0] for turn in turns]) - np.repeat(begins, self.num_turns)
        self._num_tokens = [turn[1] for turn in turns]
        self._blocks = [_mixed(np.array(turn[2], np.uint64)) for turn in turns]
        self.longest_s = float(self._after_s.max())

    @property
    def tokens_per_request(self) -> float:
        """Mean length of a prompt."""
        return sum(self._num_tokens) / len(self._num_tokens)

    def requests(
        self, per_s: float, seconds: float, seed: int, *, popular: float = 0.0
    ) -> Iterator[LoggedRequest]:
        """Requests in order of time; conversations that began before are under way at time 0.

        A share `popular` of the conversations begins with the same 8,192 tokens.
        """
        chance = np.random.default_rng(seed)
        span_s = seconds + self.longest_s
        count = chance.poisson(per_s / self.num_turns.mean() * span_s)
        drawn = chance.integers(len(self.num_turns), size=count)
        begins = chance.uniform(-self.longest_s, seconds, count)
        salts = chance.integers(2**64 - 1, size=count, dtype=np.uint64)
        salts -= salts % np.uint64(2)  # an odd salt says that the beginning is the popular one
        salts += (chance.random(count) < popular).astype(np.uint64)
        repeats = self.num_turns[drawn]
        within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        turns = np.repeat(self._first_turn[drawn], repeats) + within
        at_s = np.repeat(begins, repeats) + self._after_s[turns]
        kept = np.flatnonzero((at_s >= 0) & (at_s < seconds))
        kept = kept[np.argsort(at_s[kept], kind="stable")]
        all_salts = np.repeat(salts, repeats)[kept]
        for at, turn, salt in zip(
            at_s[kept].tolist(), turns[kept].tolist(), all_salts, strict=True
        ):
            yield self._request(at, turn, salt)

    def _request(self, at_s: float, turn: int, salt: np.uint64) -> LoggedRequest:
        blocks, num_tokens = self._blocks[turn] ^ salt, self._num_tokens[turn]
        blocks[0] ^= salt
        if salt & np.uint64(1):
            blocks = np.concatenate([_POPULAR, blocks[1:]])
            num_tokens += BLOCK_TOKENS * POPULAR_BLOCKS
        return LoggedRequest(at_s, num_tokens, blocks, BLOCK_TOKENS, None, None)


def _mixed(numbers: Names) -> Names:
    """Well-spread names for small numbers (splitmix64)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


_POPULAR = np.concatenate(
    [
        _mixed(np.zeros(1, np.uint64)),
        _mixed(np.arange(1, POPULAR_BLOCKS + 1, dtype=np.uint64) << np.uint64(40)),
    ]
)
