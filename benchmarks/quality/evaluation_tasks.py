"""Tasks for the LM Evaluation Harness that need no download: a folder with its YAML and data."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

NUM_WORDS = 60  # of each page
LEAST_WORDS = 30
NUM_CHOICES = 4

# Shots are the same for every question, as in MMLU; by default the harness draws others for each.
_COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "fewshot_split": "shots",
    "fewshot_config": {"sampler": "first_n"},
}
_GREEDY = {"until": ["\n"], "do_sample": False, "max_gen_toks": 16}
_EXACT = {"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}

PAGES: dict[str, dict[str, Any]] = {
    "pages_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Page: {{text}}\nTopic:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "pages_name": {
        "output_type": "generate_until",
        "doc_to_text": "Page: {{text}}\nTopic:",
        "doc_to_target": "name",
        "generation_kwargs": _GREEDY,
        "metric_list": [_EXACT],
    },
    "pages_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "nq_passage": {
        "output_type": "generate_until",
        "doc_to_text": "{{passage}}\nQuestion: {{question}}?\nAnswer:",
        "doc_to_target": "{{answers}}",
        "generation_kwargs": _GREEDY,
        "metric_list": [_EXACT],
    },
}


def make_tasks(folder: Path, num_shots: int, data: Path | None = None) -> list[str]:
    """Write the tasks into `folder`, for `--include_path`; their names.

    Pages are those of Python's language reference. `data` may hold nq-open-oracle.jsonl.gz, of the
    lost-in-the-middle repository.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = _write(folder, "pages", _pages(), PAGES, num_shots)
    if data is not None:
        names += _write(folder, "questions", _questions(data), QUESTIONS, num_shots)
    return names


def _write(
    folder: Path,
    source: str,
    documents: list[dict[str, Any]],
    tasks: dict[str, dict[str, Any]],
    num_shots: int,
) -> list[str]:
    files = {}
    parts = {"shots": documents[:num_shots], "test": documents[num_shots:]}
    for split, part in parts.items():
        files[split] = str(folder / f"{source}-{split}.jsonl")
        lines = (json.dumps(document) + "\n" for document in part)
        Path(files[split]).write_text("".join(lines))
    where = {"data_files": files, "cache_dir": str(folder / "datasets")}
    for name, task in tasks.items():
        shots = 0 if task["output_type"] == "loglikelihood_rolling" else num_shots
        whole = {"task": name, "dataset_kwargs": where, "num_fewshot": shots, **_COMMON, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML too
    return list(tasks)


def _pages() -> list[dict[str, Any]]:
    """Beginnings of pages without their headings, in an order of their own, and their names."""
    chance = random.Random(0)
    found = {name: _first_words(page.splitlines()[2:]) for name, page in topics.items()}
    names = sorted(name for name, text in found.items() if len(text.split()) >= LEAST_WORDS)
    chance.shuffle(names)
    documents = []
    for name in names:
        others = [other for other in names if other != name]
        choices = [name, *chance.sample(others, NUM_CHOICES - 1)]
        chance.shuffle(choices)
        documents.append(
            {"text": found[name], "name": name, "choices": choices, "answer": choices.index(name)}
        )
    return documents


def _first_words(lines: Iterable[str]) -> str:
    return " ".join(itertools.islice((word for line in lines for word in line.split()), NUM_WORDS))


def _questions(data: Path) -> list[dict[str, Any]]:
    with gzip.open(data / "nq-open-oracle.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, 300)]
    return [
        {"question": row["question"], "passage": row["ctxs"][0]["text"], "answers": row["answers"]}
        for row in rows
    ]
