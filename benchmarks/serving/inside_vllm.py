"""What does the connector save inside vLLM? Exact reuse, misses, moved passages; vLLM beside it."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.material import dtype_name, engine_of, stream, tokenizer
from benchmarks.common.measure import Row, median_ms, median_ratio, turns
from benchmarks.common.tasks import TASKS, Item, f1, items, prompt
from benchmarks.serving.vllm_server import SOURCES, VllmServer
from kvboost.bench.statistics import interval

MOST_NEW = 24
OVERLOAD_NEW = 8
Start = Callable[[dict[str, Any] | None], VllmServer]
SETTLE_S = 2.0  # before what is timed: the other server may still be writing
VERDICT = re.compile(r"audit: mean KL ([\d.]+), top-1 ([\d.]+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-python", required=True, help="a Python that has vLLM installed")
    parser.add_argument(
        "--parts", nargs="+", default=["exact", "moved"], help="exact texts moved overload copies"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--task", choices=TASKS, default="pages")
    parser.add_argument("--data", type=Path, help="folder of the public data sets")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--clients", type=int, default=16, help="of `overload`, without a pause")
    parser.add_argument(
        "--repeats", nargs="+", type=float, default=[0.25], help="of `overload`: their shares"
    )
    parser.add_argument("--arguments", nargs="*", default=[], help="more arguments for vLLM")


def run(options: argparse.Namespace) -> Iterator[Row]:
    words = tokenizer(options.model)
    more = ["--max-model-len", "8192", *options.arguments]
    with tempfile.TemporaryDirectory() as folder:
        logs = (Path(folder, f"{number}.log") for number in count())

        def start(connector: dict[str, Any] | None) -> VllmServer:
            names = options.vllm_python, options.model, next(logs)
            dtype = dtype_name(options)
            return VllmServer(*names, connector=connector, dtype=dtype, arguments=more)

        parts = {
            "exact": _exact,
            "texts": _texts,
            "moved": _moved,
            "overload": _overload,
            "copies": _copies,
        }
        for name, part in parts.items():
            if name in options.parts:
                yield from part(start, words, options)


def _exact(start: Start, words: Any, options: argparse.Namespace) -> list[Row]:
    """First token of prompts that are new, that are in our memory, and in Redis after a restart."""
    times: dict[tuple[int, str], list[float]] = {}

    def ask(server: VllmServer, what: str, tokens: Sequence[int]) -> None:
        time.sleep(SETTLE_S)
        times.setdefault((len(tokens), what), []).append(server.complete(tokens).seconds)

    asked = [
        stream(words, length, 100_000 * length + number)
        for number in range(options.rounds)
        for length in options.lengths
    ]
    from servers import redis_server  # noqa: PLC0415 - needs pytest

    with redis_server() as redis, start(None) as alone:
        url = f"redis://127.0.0.1:{redis.port}"
        ours = start({"cache_url": url, "tier_deadline_ms": 5000})
        for server in (alone, ours):  # whatever is done once
            server.complete(stream(words, 600, 10**6))
        for number, tokens in enumerate(asked):
            both = [(alone, "vllm cold"), (ours, "miss")]
            for server, what in both if number % 2 else reversed(both):
                ask(server, what, tokens)
            ask(alone, "vllm prefix cache", tokens)
            ours.forget()
            ask(ours, "memory", tokens)
            print(f"exact {number + 1}/{len(asked)}", flush=True)
        ours.stop()
        with start({"cache_url": url, "tier_deadline_ms": 5000}) as ours:
            ours.complete(stream(words, 600, 10**6 + 1))
            for tokens in asked:
                ask(ours, "redis after restart", tokens)
    return [
        {
            "part": "exact",
            "tokens": length,
            "what": what,
            "ttft_ms": median_ms(taken),
            "vllm_cold_ms": median_ms(times[length, "vllm cold"]),
            "ratio": median_ratio(taken, times[length, "vllm cold"]),
        }
        for (length, what), taken in sorted(times.items())
    ]


def _texts(start: Start, words: Any, options: argparse.Namespace) -> list[Row]:
    """How many greedy texts are those of a cold vLLM: its own from its prefix cache, and ours."""
    asked = [stream(words, 320, number) for number in range(options.prompts)]
    said = {}
    with start(None) as alone, start({}) as ours:
        for server, name in ((alone, "vllm"), (ours, "ours")):
            for state in ("cold", "warm"):
                said[name, state] = [server.complete(each, most=MOST_NEW).text for each in asked]
                if server is ours:
                    ours.forget()
    wanted = said["vllm", "cold"]
    return [
        {
            "part": "texts",
            "what": f"{name} {state}",
            "equal": sum(map(str.__eq__, texts, wanted)),
            "of": len(asked),
        }
        for (name, state), texts in said.items()
    ]


def _moved(start: Start, words: Any, options: argparse.Namespace) -> list[Row]:
    """RAG prompts whose passages were read before in other prompts, in other orders.

    The Transformers engine reads the same prompts in the same order, to tell the connector from
    the method.
    """
    made = items(options.task, options.prompts, options.data, options.documents)
    ours_s, theirs_s, lengths, scores, full_scores = [], [], [], [], []
    same = 0
    with start(None) as alone, start(_AUDITED) as ours:
        for server in (alone, ours):
            server.complete(stream(words, 600, 10**6))
        for number, item in enumerate(made):
            tokens = words(prompt(item, words), add_special_tokens=False).input_ids
            lengths.append(len(tokens))
            for earlier in _earlier(item, made, number):
                read = words(prompt(earlier, words), add_special_tokens=False).input_ids
                for server in (alone, ours):
                    server.complete(read)
            both: list[tuple[VllmServer, str | None]] = [(alone, None), (ours, "auto")]
            replies = {}
            for server, reuse in both if number % 2 else reversed(both):
                time.sleep(SETTLE_S)
                replies[reuse] = server.stream(tokens, MOST_NEW, reuse)
            (full_s, full), (moved_s, moved) = replies[None], replies["auto"]
            theirs_s.append(full_s)
            ours_s.append(moved_s)
            same += moved == full
            if item.answers:
                scores.append(f1(_first_line(moved), item.answers))
                full_scores.append(f1(_first_line(full), item.answers))
            print(f"moved {number + 1}/{len(made)}: {moved_s / full_s:.2f}", flush=True)
            ours.forget()  # waits for the audit, which is done when nothing else is
        counted = ours.counters()
        verdicts = [tuple(map(float, found)) for found in VERDICT.findall(ours.log.read_text())]
    engine = _moved_by_engine(made, words, options)
    return [
        {
            "part": "moved",
            "task": options.task,
            "prompts": len(made),
            "tokens": round(statistics.median(lengths)),
            "ttft_ms": median_ms(ours_s),
            "vllm_ms": median_ms(theirs_s),
            "ratio": median_ratio(ours_s, theirs_s),
            "moved_share": round(counted["moved_tokens_total"] / sum(lengths), 3),
            "repaired_share": round(
                counted["repaired_tokens_total"] / max(1, counted["moved_tokens_total"]), 3
            ),
            "audits": len(verdicts),
            "mean_kl": round(statistics.mean(kl for kl, _ in verdicts), 4) if verdicts else None,
            "top1": round(statistics.mean(top for _, top in verdicts), 4) if verdicts else None,
            "same_text": f"{same} of {len(made)}",
            **_scored("", scores, full_scores),
            **engine,
        }
    ]


def _moved_by_engine(made: Sequence[Item], words: Any, options: argparse.Namespace) -> Row:
    same, scores, full_scores = 0, [], []
    with engine_of(options, **_AUDITED | {"reuse": "auto"}) as engine:
        for number, item in enumerate(made):
            for earlier in _earlier(item, made, number):
                engine.generate(prompt(earlier, words), 1, reuse="exact")
            asked = prompt(item, words)
            moved = engine.generate(asked, MOST_NEW).output_text
            full = engine.generate(asked, MOST_NEW, reuse="off").output_text
            same += moved == full
            if item.answers:
                scores.append(f1(_first_line(moved), item.answers))
                full_scores.append(f1(_first_line(full), item.answers))
            print(f"Transformers {number + 1}/{len(made)}", flush=True)
            engine.flush()  # waits for the audit
        audits = engine.cache_stats()["quality"][""]
    return {
        "engine_same_text": f"{same} of {len(made)}",
        "engine_last_kl": audits["mean_kl"],  # mean of the last 16 audits
        **_scored("engine_", scores, full_scores),
    }


def _overload(start: Start, words: Any, options: argparse.Namespace) -> list[Row]:
    """Requests faster than they can be prefilled; some repeat a prompt that was sent before."""
    length, sides = options.lengths[0], ("vllm", "connector", "off")
    taken: dict[tuple[str, float], list[list[float]]] = {
        (side, repeats): [] for repeats in options.repeats for side in sides
    }

    def load(server: VllmServer, side: str, repeats: float, round_number: int, seed: int) -> None:
        chance = random.Random(round_number)  # the same repeats for all sides
        asked: list[list[int]] = []
        for number in range(options.prompts):
            is_new = not asked or chance.random() >= repeats
            asked.append(stream(words, length, seed + number) if is_new else chance.choice(asked))
        reuse = "off" if side == "off" else None
        first_s = [0.0] * len(asked)

        def ask(number: int) -> None:
            first_s[number], _ = server.stream(asked[number], OVERLOAD_NEW, reuse)

        started = time.perf_counter()
        with ThreadPoolExecutor(options.clients) as clients:
            list(clients.map(ask, range(len(asked))))
        all_s = time.perf_counter() - started
        taken[side, repeats].append([all_s, *np.percentile(first_s, [50, 95])])
        print(f"overload {side}, {repeats:.0%} repeats: {all_s:.1f} s", flush=True)

    with start(None) as alone, start({}) as ours:
        for server in (alone, ours):
            server.complete(stream(words, 600, 10**6))
        for turn, (number, (side, repeats)) in enumerate(turns(list(taken), options.rounds)):
            time.sleep(SETTLE_S)
            # Prompts of their own: no side finds what another has stored.
            load(alone if side == "vllm" else ours, side, repeats, number, 10**4 * turn)
    return [
        {
            "part": "overload",
            "what": side,
            "measured": measured,
            "clients": options.clients,
            "requests": options.prompts,
            "tokens": length,
            "repeats": repeats,
            "rounds": options.rounds,
            "s": round(statistics.median(ours_s), 3),
            "vllm_s": round(statistics.median(vllm_s), 3),
            "ratio": median_ratio(ours_s, vllm_s),
            "ratio_interval": interval(np.divide(ours_s, vllm_s), np.median),
        }
        for repeats in options.repeats
        for side in sides[1:]
        for measured, ours_s, vllm_s in zip(
            ("all", "first token p50", "first token p95"),
            zip(*taken[side, repeats], strict=True),
            zip(*taken["vllm", repeats], strict=True),
            strict=True,
        )
    ]


def _copies(_: Start, words: Any, options: argparse.Namespace) -> list[Row]:
    length, python = options.lengths[0], options.vllm_python
    return [copies(python, dtype=options.dtype, tokens=length, rounds=options.rounds)]


def copies(python: str, **task: Any) -> Row:
    """How fast K/V of 128 KB a token, as large models have, moves into blocks and out of them."""
    script = Path(__file__).with_name("vllm_copies.py")
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [python, str(script), json.dumps(task)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return {"part": "copies", **task, **json.loads(said.splitlines()[-1])}


def _scored(who: str, scores: list[float], full_scores: list[float]) -> Row:
    """Mean task score on moved text, of a full prefill, and where their difference lies."""
    if not scores:
        return {}
    return {
        f"{who}score": round(statistics.mean(scores), 4),
        f"{who}full_score": round(statistics.mean(full_scores), 4),
        f"{who}score_change_interval": interval(np.subtract(scores, full_scores), np.mean),
    }


_AUDITED = {"reuse": "exact", "audit_ratio": 1.0, "quality_budget": 100.0}
"""Audits measure here, and must not change what they measure."""


def _earlier(item: Item, made: Sequence[Item], number: int) -> Iterator[Item]:
    """Two prompts with half of the passages each, among passages of others."""
    chance = random.Random(number)
    shuffled = chance.sample(item.documents, len(item.documents))
    half = len(shuffled) // 2
    for part in (shuffled[:half], shuffled[half:]):
        other = made[(number + chance.randrange(1, max(2, len(made)))) % len(made)]
        mixed = [*other.documents[: len(item.documents) - len(part)], *part]
        chance.shuffle(mixed)
        yield Item(mixed, other.question, [])


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0].replace("<|im_end|>", "")
