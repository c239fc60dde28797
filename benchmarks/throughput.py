"""How much do many get at once? New tokens a second, beside Transformers and vLLM, by turns.

Every round has texts of its own, so the prefix that its prompts share is computed within the
clock, once by who can. The warm figures are the same prefix again with other endings.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from batchers import Apart, Batcher, ContinuousBatching, OneByOne, Ours, Vllm
from material import stream, tokenizer
from measure import seconds

REFERENCE = "transformers"
PEERS = ("transformers", "cb", "vllm")
GOALS = {"transformers": 6.0, "cb": 1.5, "vllm": 1.5}
WARM_UP_TOKENS = 4
WARM = " warm"  # behind the name of who is asked for the second time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=16, help="prompts at once")
    parser.add_argument("--shared", type=int, default=1024, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=50, help="tokens of each prompt alone")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--peers", default=",".join(PEERS[:2]), help=f"of {','.join(PEERS)}")
    parser.add_argument("--prepack", action="store_true", help="ours with prepack_weights=True")
    parser.add_argument("--vllm-python", help="a Python that has vLLM installed")
    parser.add_argument("--vllm-eager", action="store_true", help="do not let vLLM compile")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    peers = [name for name in options.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        raise SystemExit(f"--peers {','.join(unknown)}: known are {', '.join(PEERS)}")
    if "vllm" in peers and not options.vllm_python:
        raise SystemExit("--peers vllm needs --vllm-python")
    rows = []
    for name in options.model:
        with _batchers(name, peers, options) as batchers:
            times, answers = _measure(name, batchers, options)
        for row in _rows(times, answers, options):
            about = batchers[row["who"].removesuffix(WARM)].about
            row = {"model": name.rstrip("/").split("/")[-1], "dtype": options.dtype} | row | about
            rows.append(row)
            ours = f"   ours / this {row['ours_ratio']:.2f}" if "ours_ratio" in row else ""
            goal = f" (goal {row['goal']})" if "goal" in row else ""
            same = f"   {row['same']} of {row['answers']} as one by one" if "same" in row else ""
            print(
                f"{row['model']:28} {row['who']:18} {row['tokens_per_s']:7.1f} tokens/s"
                f" ({row['low']:.1f}-{row['high']:.1f}){ours}{goal}{same}",
                flush=True,
            )
    return rows


@contextlib.contextmanager
def _batchers(
    name: str, peers: list[str], options: argparse.Namespace
) -> Iterator[dict[str, Batcher]]:
    with contextlib.ExitStack() as stack:
        batchers: dict[str, Batcher] = {}
        if "vllm" in peers:  # first: when it measures the free memory it has most of it
            longest = options.shared + options.own + options.new + 1
            batchers["vllm"] = Vllm(
                options.vllm_python, name, options.dtype, longest, is_eager=options.vllm_eager
            )
            stack.callback(batchers["vllm"].close)
            print(f"vLLM is up: {batchers['vllm'].about}", flush=True)
        ours = partial(Apart, Ours, name, options.dtype, options.clients)
        makers: dict[str, Callable[[], Batcher]] = {
            "ours": partial(ours, prepack_weights=options.prepack),
            "transformers": partial(Apart, OneByOne, name, options.dtype),
            "cb": partial(Apart, ContinuousBatching, name, options.dtype),
        }
        for who in ("ours", *(peer for peer in peers if peer != "vllm")):
            batchers[who] = makers[who]()
            stack.callback(batchers[who].close)
        yield {who: batchers[who] for who in ("ours", *peers)}


def _measure(
    name: str, batchers: dict[str, Batcher], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    words = tokenizer(name)
    times: dict[str, list[float]] = defaultdict(list)
    answers: dict[str, list[list[int]]] = defaultdict(list)

    def answer(who: str, prompts: list[list[int]], num_new: int, note: str = "") -> None:
        got: list[list[int]] = []
        took = seconds(lambda: got.extend(batchers[who].answer(prompts, num_new)))
        if [len(tokens) for tokens in got] != [num_new] * len(prompts):
            raise RuntimeError(f"{who}: answers have {[len(tokens) for tokens in got]} tokens")
        times[who + note].append(took)
        answers[who + note] += got
        print(f"  {who + note}: {took:.1f} s", flush=True)

    warm_up = _prompts(words, options, seed=0)
    for who in batchers:
        answer(who, warm_up[:1] if who == REFERENCE else warm_up, WARM_UP_TOKENS)
    times.clear()
    answers.clear()
    for turn in range(options.rounds):
        prompts = _prompts(words, options, seed=2 * turn + 1)
        again = _prompts(words, options, seed=2 * turn + 1, own_seed=2 * turn + 2)
        order = list(batchers)
        for who in order[turn % len(order) :] + order[: turn % len(order)]:
            answer(who, prompts, options.new)
            if batchers[who].has_cache:
                answer(who, again, options.new, WARM)
    return dict(times), dict(answers)


def _prompts(
    words: Any, options: argparse.Namespace, seed: int, own_seed: int | None = None
) -> list[list[int]]:
    shared = stream(words, options.shared, seed)
    first = 1000 * (1 + (seed if own_seed is None else own_seed))
    return [shared + stream(words, options.own, first + n) for n in range(options.clients)]


def _rows(
    times: dict[str, list[float]],
    answers: dict[str, list[list[int]]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row for each who; ratios are medians of the rounds' ratios."""
    num_tokens = options.clients * options.new
    rows = []
    for who, took in times.items():
        row: dict[str, Any] = {"who": who, "clients": options.clients, "new": options.new}
        row |= {"shared": options.shared, "own": options.own, "rounds": len(took)}
        row["tokens_per_s"] = round(num_tokens / statistics.median(took), 2)
        row["low"] = round(num_tokens / max(took), 2)
        row["high"] = round(num_tokens / min(took), 2)
        ours = times["ours" + WARM if who.endswith(WARM) else "ours"]
        if not who.startswith("ours"):
            pairs = zip(took, ours, strict=True)
            row["ours_ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
            row |= {"goal": GOALS[who]} if who in GOALS else {}
        if REFERENCE in answers and who != REFERENCE and not who.endswith(WARM):
            pairs_of_answers = zip(answers[who], answers[REFERENCE], strict=True)
            row["same"] = sum(a == b for a, b in pairs_of_answers)
            row["answers"] = len(answers[who])
        rows.append(row)
    return rows
