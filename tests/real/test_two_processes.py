"""Two processes on one store, with a real model: what one has computed the other reuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from servers import mooncake_master, redis_server

pytestmark = [pytest.mark.model, pytest.mark.servers]

DOCUMENT = (
    "The reading room opens at nine on weekdays and at eleven on Saturdays. Members may borrow "
    "six volumes for three weeks; a volume that nobody has reserved can be kept for two weeks "
    "more. Maps, bound newspapers and everything printed before 1850 stay in the house and are "
    "handed out at the desk on the second floor, where bags have to be left in the lockers. "
    "Copies cost ten cents a page, scans are free. The catalogue lists what was bought since "
    "1974; for older books there are cards in the hall, sorted by author, and a clerk who knows "
    "them by heart. "
) * 3
PROMPTS = [f"{DOCUMENT}\nQuestion: {question}\nAnswer:" for question in ("When?", "How many?")]
MOVED = f"You answer questions about a library.\n{DOCUMENT}\nQuestion: What does a scan cost?"

SCRIPT = """
import json, sys
from kvboost import KVBoost
task = json.loads(sys.argv[1])
engine = KVBoost.from_pretrained(task["model"], cache_url=task["url"], tier_deadline_ms=20_000)
results = [engine.generate(prompt, 12) for prompt in task["prompts"]]
# Whether moved text is worth its repair is another matter, which the clock decides.
engine._parts.cost.pays = lambda *work: True
moved = engine.explain(task["moved"], reuse="auto")
engine.flush()
print(json.dumps({
    "texts": [result.output_text for result in results],
    "cached": [result.cached_tokens for result in results],
    "tokens": [result.prompt_tokens for result in results],
    "moved": sum(len(s.span) for s in moved.spans if s.kind.value == "moved"),
    "tiers": engine.cache_stats()["tiers"],
}), flush=True)
sys.stdin.read()  # a process that has left takes its part of a Mooncake store with it
engine.close()
"""


@contextmanager
def process(task: dict[str, Any], hash_seed: str) -> Iterator[dict[str, Any]]:
    """What a process of its own says, which lives until the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    ) as child:
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())


@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_what_one_process_computed_another_reuses(kind: str, smol: str) -> None:
    start = redis_server if kind == "redis" else mooncake_master
    with start() as server:
        url = f"{kind}://127.0.0.1:{server.port}"
        task = {"model": smol, "url": url, "prompts": PROMPTS, "moved": MOVED}
        with process(task, "1") as first, process(task, "2") as second:
            assert second["texts"] == first["texts"]
            assert first["cached"][0] == 0
            # All but the rest behind the last whole chunk, which is stored with its output.
            assert all(
                cached > 0.97 * count
                for cached, count in zip(second["cached"], second["tokens"], strict=True)
            )
            assert second["tiers"][kind]["hits"] > 0 and second["tiers"][kind]["faults"] == 0
            assert second["moved"] > 0.9 * min(first["moved"], second["tokens"][0])
