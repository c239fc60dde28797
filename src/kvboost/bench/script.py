"""The parts of a run: measuring, asking, judging; each leaves out what is done already."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvboost.bench import records, traffic
from kvboost.bench.environments import python_of
from kvboost.bench.judge import Judge
from kvboost.bench.machine import commit, machine
from kvboost.bench.records import Line
from kvboost.bench.settings import Settings
from kvboost.bench.systems import SYSTEMS, System, WorkerProcess
from kvboost.bench.workloads import Ask, Session, sessions
from kvboost.errors import ConfigError, KVBoostError

if TYPE_CHECKING:
    from tqdm import tqdm

RAW = "raw.jsonl"
MOST_TOKENS = 4096  # of a prompt with its answer
GGUF_READER = "llama"

Work: TypeAlias = Callable[[str, WorkerProcess], None]  # takes the name of a system, too
Task: TypeAlias = tuple[str, str, Work]  # what is shown, the name of a system


class Script:
    """A run, part by part."""

    def __init__(self, settings: Settings, folder: Path, tokenizer: Any) -> None:
        self._settings, self._folder, self._tokenizer = settings, folder, tokenizer
        self._raw = folder / RAW
        self._sessions = sessions(tokenizer, settings.workloads, settings.seed, settings.num_tokens)
        self._traffic = self._requests()

    def measure(self) -> None:
        """Every session of every system, in rounds and in an order drawn by chance; traffic."""
        tasks = [*self._sessions_left(), *self._traffic_left()]
        names = {name for _, name, _ in tasks}
        if not tasks:
            return
        with ExitStack() as stack:
            workers: dict[str, WorkerProcess] = {}
            stack.callback(_close, workers)
            self._start([SYSTEMS[name] for name in SYSTEMS if name in names], workers)
            bar = stack.enter_context(_bar(len(tasks), "measuring"))
            for title, name, work in tasks:
                bar.set_postfix_str(title)
                if name in workers:
                    self._try(workers, name, work)
                bar.update()

    def ask_questions(self) -> None:
        """What is asked of ours beside bare Transformers in one process."""
        lines = records.read(self._raw)
        done = {line["question"] for line in lines if line["kind"] == "question"}
        left = [each for each in self._settings.questions if each not in done]
        if not left:
            return
        with _bar(len(left), "questions") as bar:
            rows = itertools.groupby(self._rows(left), key=lambda row: row["question"])
            for question, told in rows:
                bar.set_postfix_str(question)
                records.append(self._raw, [{"kind": "question", **row} for row in told])
                bar.update()

    def judge(self) -> None:
        """Each answer once, however many systems and rounds gave it."""
        lines = records.read(self._raw)
        asks = {(s.workload, n): ask for s in self._sessions for n, ask in enumerate(s.asks)}
        told = [line for line in lines if line["kind"] in ("answer", "judged")]
        keys = [(line["workload"], line["ask"], tuple(line["answer"])) for line in told]
        known = {key for key, line in zip(keys, told, strict=True) if line["kind"] == "judged"}
        left = [key for key in dict.fromkeys(keys) if key not in known]
        if not left:
            return
        judge = Judge(self._settings.model)
        with _bar(len(left), "judging") as bar:
            for workload, number, answer in left:
                ask = asks[workload, number]
                verdict = judge.verdict(ask.tokens, answer)
                judged = {"workload": workload, "ask": number, "answer": list(answer), **verdict}
                judged["score"] = self._score(ask, answer)
                records.append(self._raw, [{"kind": "judged", **judged}])
                bar.update()

    def note_part(self, seconds: float) -> None:
        """What ran where, and how long; a run that was stopped has several parts."""
        settings = self._settings.shown()
        about = {name: settings[name] for name in ("model", "dtype", "seed", "rounds", "is_quick")}
        about |= {"seconds": round(seconds), "date": time.strftime("%Y-%m-%d")}
        about |= {"commit": commit(), "machine": machine(), "settings": settings}
        records.append(self._raw, [{"kind": "run", **about}])

    def _sessions_left(self) -> Iterator[Task]:
        """Round by round, so that a run that is stopped has all workloads; systems alternate."""
        answers = [line for line in records.read(self._raw) if line["kind"] == "answer"]
        done = Counter((line["workload"], line["round"], line["system"]) for line in answers)
        chance, rounds = random.Random(self._settings.seed), self._settings.rounds
        for number in range(rounds):
            names = [
                name
                for name in self._settings.systems
                if number < (SYSTEMS[name].most_rounds or rounds)
            ]
            for session in self._sessions:
                for name in chance.sample(names, len(names)):
                    if done[session.workload, number, name] < len(session.asks):
                        work = partial(self._hold_session, session, number)
                        yield f"{session.workload} {name}", name, work

    def _traffic_left(self) -> Iterator[Task]:
        lines = records.read(self._raw)
        done = {line["system"] for line in lines if line["kind"] == "traffic"}
        names = [name for name in self._settings.systems if SYSTEMS[name].can_traffic]
        left = [name for name in names if self._traffic and name not in done]
        for name in random.Random(self._settings.seed).sample(left, len(left)):
            yield f"traffic {name}", name, self._let_traffic_come

    def _requests(self) -> list[Line]:
        if self._settings.data is None or self._settings.is_quick:
            return []
        return traffic.requests(Path(self._settings.data), self._tokenizer, self._settings.seed)

    def _start(self, systems: Sequence[System], workers: dict[str, WorkerProcess]) -> None:
        """Add workers of the systems that can be had here; of the others is noted why not."""
        with _bar(len(systems), "starting") as bar:
            for system in systems:
                bar.set_postfix_str(system.name)
                try:
                    worker = self._worker(system)
                except KVBoostError as error:
                    self._note_absent(system, error)
                else:
                    workers[system.name] = worker
                    self._note(kind="system", system=system, versions=worker.versions)
                bar.update()

    def _worker(self, system: System) -> WorkerProcess:
        python = python_of(system.environment)
        if python is None:
            command = f"kvboost bench setup {system.environment}"
            raise ConfigError(f"its environment was not made here: `{command}`")
        if system.environment == GGUF_READER and self._settings.gguf is None:
            raise ConfigError("it reads GGUF files: give one with --gguf")
        given = {
            "model": self._settings.model,
            "dtype": self._settings.dtype,
            "gguf": self._settings.gguf,
            "max_tokens": MOST_TOKENS,
            "num_threads": os.cpu_count(),
        }
        worker = WorkerProcess(system, python, given, self._log(system.name))
        try:
            # What a first answer costs besides is not what is measured.
            worker.ask(self._sessions[0].asks[0].tokens, 2)
        except KVBoostError:
            worker.close()
            raise
        return worker

    def _try(self, workers: dict[str, WorkerProcess], name: str, work: Work) -> None:
        """A system that fails is left out from there on; what it measured stays."""
        try:
            work(name, workers[name])
        except KVBoostError as error:
            self._note_absent(SYSTEMS[name], error)
            workers.pop(name).close()  # it might go on computing beside the others

    def _hold_session(
        self, session: Session, round_number: int, name: str, worker: WorkerProcess
    ) -> None:
        worker.forget()
        lines: list[Line] = []
        for number, ask in enumerate(session.asks):
            said = worker.ask(ask.tokens, ask.num_new)
            worker.rest()
            if len(said["tokens"]) != ask.num_new:
                raise KVBoostError(f"{len(said['tokens'])} tokens instead of {ask.num_new}")
            if number == 0 and said["num_cached"]:
                raise KVBoostError(f"{said['num_cached']} tokens were cached before a session")
            lines.append(
                {
                    "kind": "answer",
                    "workload": session.workload,
                    "system": name,
                    "round": round_number,
                    "ask": number,
                    "phase": ask.phase,
                    "prompt_tokens": len(ask.tokens),
                    "num_cached": said["num_cached"],
                    "ttft_ms": round(1e3 * said["ttft_s"], 3),
                    "total_ms": round(1e3 * said["total_s"], 3),
                    "stages_ms": {key: round(ms, 3) for key, ms in said["stages_ms"].items()},
                    "answer": said["tokens"],
                }
            )
        records.append(self._raw, lines)

    def _let_traffic_come(self, name: str, worker: WorkerProcess) -> None:
        worker.forget()
        started = time.perf_counter()
        served = worker.traffic(self._traffic)
        line: Line = {"kind": "traffic", "system": name}
        line["seconds"] = round(time.perf_counter() - started, 3)
        for metric in ("ttft", "total"):
            line[f"{metric}_ms"] = [round(1e3 * each[f"{metric}_s"], 2) for each in served]
        records.append(self._raw, [line])

    def _rows(self, questions: list[str]) -> Iterator[Line]:
        """Rows as they come, those of a question together."""
        settings = asdict(self._settings)
        shared = ("model", "dtype", "seed", "rounds", "is_quick")
        task = {"questions": questions, **{name: settings[name] for name in shared}}
        log = self._log("questions")
        command = [sys.executable, "-m", "kvboost.bench.questions.ask", json.dumps(task)]
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as asked,
        ):
            assert asked.stdout is not None
            yield from map(json.loads, asked.stdout)
        if asked.returncode != 0:
            tail = log.read_text(errors="replace")[-2000:]
            raise KVBoostError(f"the questions broke off:\n{tail}")

    def _log(self, name: str) -> Path:
        path = self._folder / "logs" / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        return path

    def _score(self, ask: Ask, answer: Sequence[int]) -> float | None:
        if not ask.fact:
            return None
        return float(ask.fact in self._tokenizer.decode(list(answer)))

    def _note_absent(self, system: System, error: KVBoostError) -> None:
        """Its log stays in the folder; what is told has no paths of this machine."""
        why = str(error).splitlines()[0].partition("; its log")[0]
        self._note(kind="absent", system=system, why=why)

    def _note(self, *, kind: str, system: System, **what: Any) -> None:
        line = {"kind": kind, "system": system.name, "title": system.title, **what}
        records.append(self._raw, [line])


def _close(workers: dict[str, WorkerProcess]) -> None:
    for worker in workers.values():
        worker.close()


def _bar(total: int, title: str) -> tqdm[Any]:
    from tqdm.auto import tqdm  # noqa: PLC0415  (comes with Transformers)

    return tqdm(total=total, desc=title, unit="", dynamic_ncols=True)
