"""All questions, and a process that asks them: a task as JSON in, one row of JSON a line out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from kvboost.bench.questions.frontier import frontier
from kvboost.bench.questions.hits import hits
from kvboost.bench.questions.pairs import chunk, length, memory, modes, share
from kvboost.bench.questions.subjects import Row, Subject
from kvboost.errors import ConfigError

QUESTIONS: dict[str, Callable[[Subject], Iterator[Row]]] = {
    "length": length,
    "share": share,
    "modes": modes,
    "frontier": frontier,
    "chunk": chunk,
    "memory": memory,
    "hits": hits,
}

WITHOUT_MODEL = {"hits"}


def ask_all(subject: Subject, questions: Sequence[str]) -> Iterator[Row]:
    """The rows of all questions as they come; seconds per question go to stderr.

    Raises:
        ConfigError: there is no such question.
    """
    unknown = [name for name in questions if name not in QUESTIONS]
    if unknown:
        raise ConfigError(f"no question {unknown[0]!r}: expected some of {', '.join(QUESTIONS)}")
    if not WITHOUT_MODEL.issuperset(questions):
        subject.warm_up()
    for name in questions:
        started = time.perf_counter()
        for row in QUESTIONS[name](subject):
            yield {"question": name, **row}
        taken_s = time.perf_counter() - started
        sys.stderr.write(f"{name}: {taken_s:.1f} s\n")


def own_stdout() -> TextIO:
    """The process's stdout for rows alone; all else that prints there goes to stderr now."""
    rows = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return rows


def main(arguments: Sequence[str]) -> None:
    """Answer the task that the only argument describes."""
    task: dict[str, Any] = json.loads(arguments[0])
    questions = task.pop("questions", list(QUESTIONS))
    rows, subject = own_stdout(), Subject(**task)
    try:
        for row in ask_all(subject, questions):
            print(json.dumps(row), file=rows, flush=True)
    finally:
        subject.close()


if __name__ == "__main__":
    main(sys.argv[1:])
