"""Writes a synthetic log of requests in Mooncake's format to standard output.

Conversations start with one of many system prompts, few of which are popular (Zipf), and grow by
some blocks a turn. `python scripts/make_log.py --requests 1000000 | kvboost analyze`
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import accumulate

BLOCK_TOKENS = 512
NUM_SYSTEM_PROMPTS = 1000
MOST_TURNS = 8
MEAN_GAP_MS = 50


def main() -> None:
    """Write the log that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--open", type=int, default=500, help="conversations at a time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        write(options.requests, options.open, random.Random(options.seed))
    except BrokenPipeError:
        sys.stderr.close()  # the reader has what it wanted


def write(num_requests: int, num_open: int, chance: random.Random) -> None:
    """Write `num_requests` lines, from `num_open` conversations by turns of chance."""
    prompts = [range(50 * n, 50 * n + chance.randint(1, 12)) for n in range(NUM_SYSTEM_PROMPTS)]
    popularity = list(accumulate(1 / (rank + 1) for rank in range(NUM_SYSTEM_PROMPTS)))
    next_id = 50 * NUM_SYSTEM_PROMPTS
    talks: list[tuple[int, str, int]] = [(0, "", 0)] * num_open  # turns left, ids, blocks
    now_ms = 0.0
    for _ in range(num_requests):
        place = int(chance.random() * num_open)
        turns, ids, num_blocks = talks[place]
        if not turns:
            prompt = chance.choices(prompts, cum_weights=popularity)[0]
            turns, ids, num_blocks = chance.randint(1, MOST_TURNS), _listed(prompt), len(prompt)
        num_new = chance.randint(1, 6)
        ids = f"{ids}, {_listed(range(next_id, next_id + num_new))}"
        next_id += num_new
        num_blocks += num_new
        talks[place] = (turns - 1, ids, num_blocks)
        now_ms += chance.expovariate(1 / MEAN_GAP_MS)
        sys.stdout.write(
            f'{{"timestamp": {now_ms:.0f}, "input_length": {BLOCK_TOKENS * num_blocks}, '
            f'"output_length": 200, "hash_ids": [{ids}]}}\n'
        )


def _listed(ids: range) -> str:
    return ", ".join(map(str, ids))


if __name__ == "__main__":
    main()
