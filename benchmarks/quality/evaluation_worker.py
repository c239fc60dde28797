"""One model of the LM Evaluation Harness on some tasks, in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import kvboost.integrations.lm_eval  # noqa: F401 - registers the model

CALLS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


def main() -> None:
    task = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = get_model(task["name"])(device=device, **task["arguments"])
    manager = TaskManager(include_path=task["folder"], include_defaults=False)
    outcomes = {name: evaluate(lm, name, manager, task["limit"]) for name in task["tasks"]}
    print(json.dumps(outcomes))


def evaluate(
    lm: Any, name: str, manager: TaskManager, limit: int | None
) -> tuple[dict[str, float], float]:
    """The scores of a task by metric, and the seconds that the model's answers took."""
    clock = Clock(lm)
    found = simple_evaluate(
        lm, tasks=[name], task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=False
    )
    clock.stop()
    assert found is not None
    results = found["results"][name].items()
    scores = {
        key.split(",")[0]: value
        for key, value in results
        if isinstance(value, float) and "stderr" not in key
    }
    return scores, clock.seconds


class Clock:
    """Counts the time that a model of the harness spends in its calls."""

    def __init__(self, lm: Any) -> None:
        self.seconds = 0.0
        self._lm = lm
        for name in CALLS:
            setattr(lm, name, self._timed(getattr(lm, name)))

    def stop(self) -> None:
        for name in CALLS:
            delattr(self._lm, name)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **more)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


if __name__ == "__main__":
    main()
