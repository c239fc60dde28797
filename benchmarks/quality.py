"""How wrong is moved K/V, and what does repair cost? Strategies x ratios x encodings, by task."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvboost import KVBoost
from kvboost.build import Parts, build_repair, build_store
from kvboost.engine.prefill import Terms, complete, keep, prefill
from kvboost.engine.texts import PREFACE, tokens_of
from kvboost.engine.verify import compare
from kvboost.engine.warm import warm_up
from kvboost.models.certify import Rotations
from kvboost.policy.cost import CostModel
from material import DTYPES, model, tokenizer
from tasks import Item, f1, items, prompt

MOST_NEW = 32


@dataclass(frozen=True)
class Case:
    """One row of the frontier."""

    name: str
    encoding: str  # how the documents were read before: other prompts, warmed, alone, bos
    strategy: str
    ratio: float = 0.0
    overlap: int = 16
    tail: int = 0
    turns_keys: bool = True  # False: K stays rotated for its old position, as in the package


CASES = [
    Case("exact reuse (noise floor)", "same prompt", "none"),
    Case("concatenate at old positions", "alone", "none", turns_keys=False),
    Case("move only", "alone", "none"),
    Case("heads 16", "alone", "selective"),
    Case("CacheBlend 15 %", "alone", "cacheblend", 0.15),
    Case("sampled 10 %", "alone", "sampled", 0.10),
    Case("sampled 10 %", "bos", "sampled", 0.10),
    Case("move only", "warmed", "none"),
    Case("heads 16", "warmed", "selective"),
    Case("heads 16 + tails 16", "warmed", "selective", tail=16),
    Case("sensitivity 10 %", "warmed", "sensitivity", 0.10),
    Case("sampled 10 %", "warmed", "sampled", 0.10),
    Case("move only", "other prompts", "none"),
    Case("heads 16", "other prompts", "selective"),
    Case("heads 32", "other prompts", "selective", overlap=32),
    Case("CacheBlend 15 %", "other prompts", "cacheblend", 0.15),
    Case("query 10 %", "other prompts", "query", 0.10),
    Case("sampled 10 %, no heads", "other prompts", "sampled", 0.10, overlap=0),
    Case("sampled 5 %", "other prompts", "sampled", 0.05),
    Case("sampled 8 %", "other prompts", "sampled", 0.08),
    Case("sampled 10 %", "other prompts", "sampled", 0.10),
    Case("sampled 12 %", "other prompts", "sampled", 0.12),
    Case("sampled 15 %", "other prompts", "sampled", 0.15),
    Case("sampled 20 %", "other prompts", "sampled", 0.20),
    Case("sampled 40 %", "other prompts", "sampled", 0.40),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", nargs="+", default=["pages"], help="pages musique hotpot nq")
    parser.add_argument("--data", type=Path, help="folder of the public data sets")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of 'encoding: case'")
    parser.add_argument("--keep", type=Path, help="file that gets one JSON line per measurement")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.model:
        words = tokenizer(name)
        engine = KVBoost(model(name, DTYPES[options.dtype]), words, reuse="auto")
        for task in options.task:
            found = _measure_task(name, task, engine, words, options)
            rows += found
            _show(found)
        engine.close()
    return rows


def _measure_task(
    model_name: str, task: str, engine: KVBoost, words: Any, options: argparse.Namespace
) -> list[dict[str, Any]]:
    made = items(task, options.prompts + 4, options.data, options.documents)
    named = {f"{case.encoding}: {case.name}": case for case in CASES}
    cases = [c for name, c in named.items() if any(part in name for part in options.cases)]
    seen: dict[Case, list[dict[str, float]]] = defaultdict(list)
    for number in range(options.prompts):
        others = [text for item in made[number + 1 : number + 5] for text in item.documents]
        for case, measured in _measure_item(made[number], others, cases, engine, words, number):
            seen[case].append(measured)
            if options.keep:
                line = {"model": Path(model_name).name, "dtype": options.dtype, "task": task}
                line |= {"number": number, "case": case.name, "encoding": case.encoding}
                with options.keep.open("a") as file:
                    file.write(json.dumps(line | measured) + "\n")
        print(f"{task} {number + 1}/{options.prompts}", flush=True)
    return [
        {
            "model": Path(model_name).name,
            "dtype": options.dtype,
            "task": task,
            "encoding": case.encoding,
            "case": case.name,
            **summary(seen[case]),
        }
        for case in cases
    ]


def summary(measured: list[dict[str, float]]) -> dict[str, float]:
    """Means over the prompts; the time share is a median."""
    means = {
        key: round(statistics.mean(each[key] for each in measured), 4)
        for key in measured[0]
        if key not in ("time_share", "full_s")
    }
    share = statistics.median(each["time_share"] for each in measured)
    full = statistics.median(each["full_s"] for each in measured)
    median = statistics.median(each["kl"] for each in measured)
    return {
        "prompts": len(measured),
        **means,
        "median_kl": round(median, 4),
        "time_share": round(share, 3),
        "full_s": round(full, 2),
    }


def _measure_item(
    item: Item, others: list[str], cases: list[Case], engine: KVBoost, words: Any, number: int
) -> list[tuple[Case, dict[str, float]]]:
    base = engine._parts  # noqa: SLF001
    tokens = tokens_of(prompt(item, words), words, item.documents)
    parts = _fresh(base)
    full_s, answer, fresh = _reference(tokens, parts, words)
    results, stores = [], {}
    for case in cases:
        options = replace(
            base.options,
            recompute_strategy=case.strategy,
            recompute_ratio=case.ratio,
            recompute_overlap=case.overlap,
            recompute_tail=case.tail,
        )
        repairs = {case.ratio: build_repair(options, case.ratio)}
        kind = case.encoding + (" ranked" if case.strategy == "sensitivity" else "")
        if kind not in stores:
            stores[kind] = _fresh(replace(base, options=options)).store
            reading = replace(base, options=options, store=stores[kind], cost=CostModel())
            _read_documents(item, others, case.encoding, reading, words, number)
        parts = replace(base, options=options, store=stores[kind], repairs=repairs)
        parts = replace(parts, cost=CostModel())
        with _Rotations(parts, turns_keys=case.turns_keys):
            results.append((case, _measure_case(tokens, answer, fresh, full_s, parts, case)))
    for _, measured in results:
        said = words.decode(measured.pop("tokens"), skip_special_tokens=True)
        if item.answers:
            measured["score"] = f1(said, item.answers)
            right = words.decode(answer, skip_special_tokens=True)
            measured["full_score"] = f1(right, item.answers)
    return results


def _fresh(parts: Parts) -> Parts:
    """The same engine with an empty store."""
    options = replace(parts.options, max_cache_bytes=8 * 2**30)
    return replace(parts, store=build_store(options, parts.model.geometry, parts.metrics))


def _reference(
    tokens: list[int], parts: Parts, words: Any
) -> tuple[float, list[int], torch.Tensor]:
    """Time of a full prefill, the greedy answer on it, and the logits that it was chosen from."""
    started = time.perf_counter()
    prefilled = prefill(tokens, parts, Terms("off"), capacity=len(tokens) + MOST_NEW)
    first = complete(prefilled, tokens, parts)
    full_s = time.perf_counter() - started
    answer, logits = _greedy(prefilled.rows, first, parts, words)
    prefilled.rows.release()
    return full_s, answer, logits


def _greedy(rows: Any, logits: torch.Tensor, parts: Parts, words: Any) -> tuple[Any, Any]:
    ends = {words.eos_token_id, words.convert_tokens_to_ids("<|im_end|>")}
    said, seen = [], []
    while True:
        seen.append(logits.float())
        said.append(int(logits[-1].argmax()))
        if said[-1] in ends or len(said) == MOST_NEW:
            return said, torch.cat(seen)
        step = range(rows.length, rows.length + 1)
        logits = parts.model.forward(rows, said[-1:], step)


def _measure_case(
    tokens: list[int],
    answer: list[int],
    fresh: torch.Tensor,
    full_s: float,
    parts: Parts,
    case: Case,
) -> dict[str, Any]:
    terms = Terms("auto", "", case.ratio)
    started = time.perf_counter()
    prefilled = prefill(tokens, parts, terms, capacity=len(tokens) + MOST_NEW)
    first = complete(prefilled, tokens, parts)
    taken_s = time.perf_counter() - started
    rows, logits = prefilled.rows, first
    if len(answer) > 1:
        stop = len(tokens) + len(answer) - 1
        rest = parts.model.forward(
            rows, answer[:-1], range(len(tokens), stop), num_logits=len(answer) - 1
        )
        logits = torch.cat([first, rest])
    check = compare(fresh, logits.float(), len(tokens), prefilled.plan.num_reused)
    same = logits.argmax(-1).tolist()
    if same != answer:  # the greedy answer parts from the reference somewhere: follow its own way
        rows.crop(len(tokens))
        same, _ = _greedy(rows, first, parts, _Ends(answer))
    rows.release()
    return {
        "kl": check.mean_kl,
        "top1": check.top1_ratio,
        "same_answer": float(check.first_difference is None),
        "found": prefilled.plan.num_reused / len(tokens),
        "computed": len(prefilled.pending) / len(tokens),
        "time_share": taken_s / full_s,
        "full_s": full_s,
        "tokens": same,
        "prompt_tokens": len(tokens),
    }


class _Ends:
    """Stops a greedy answer where the reference stopped."""

    def __init__(self, answer: list[int]) -> None:
        self.eos_token_id = answer[-1] if len(answer) < MOST_NEW else None

    def convert_tokens_to_ids(self, _: str) -> int | None:
        return self.eos_token_id


def _read_documents(
    item: Item, others: list[str], encoding: str, parts: Parts, words: Any, number: int
) -> None:
    """Let the store see each document once, as `encoding` says."""
    before = {"alone": [], "bos": [words.bos_token_id or words.eos_token_id]}
    before["warmed"] = tokens_of(PREFACE, words)
    if encoding == "same prompt":
        tokens = tokens_of(prompt(item, words), words, item.documents)
        warm_up(tokens, parts, before=[], tenant="")
        return
    chance = random.Random(number)
    for document in item.documents:
        if encoding in before:
            text = words(document, add_special_tokens=False).input_ids
            warm_up(text, parts, before=before[encoding], tenant="")
            continue
        # In another prompt: behind one to three documents of other questions.
        around = chance.sample(others, chance.randint(1, 3))
        other = Item([*around, document], "What is this about?", [])
        tokens = tokens_of(prompt(other, words), words, other.documents)
        prefilled = prefill(tokens, parts, Terms("exact"), capacity=len(tokens))
        complete(prefilled, tokens, parts)
        keep(prefilled, tokens, parts, tenant="")
        prefilled.rows.release()


class _Rotations:
    """Within it, keys are moved without being turned, if so asked."""

    def __init__(self, parts: Parts, *, turns_keys: bool) -> None:
        self._model, self._turns_keys = parts.model, turns_keys

    def __enter__(self) -> None:
        self._certified = self._model._rotations  # noqa: SLF001
        if not self._turns_keys:
            still = Rotations(planes=dict.fromkeys(self._certified.planes))
            self._model._rotations = still  # noqa: SLF001

    def __exit__(self, *error: object) -> None:
        self._model._rotations = self._certified  # noqa: SLF001


def _show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'encoding':14} {'case':30} {'KL':>7} {'median':>7} {'top-1':>6} {'F1':>11} {'time':>6}"
    )
    for row in rows:
        score = f"{row['score']:.2f}/{row['full_score']:.2f}" if "score" in row else "-"
        print(
            f"{row['encoding']:14} {row['case']:30} {row['kl']:7.4f} {row['median_kl']:7.4f}"
            f" {row['top1']:6.3f} {score:>11} {row['time_share']:6.3f}",
            flush=True,
        )
