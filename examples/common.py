"""Shared by the examples: settings, the engine, and each prompt run with and without reuse."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dotenv import dotenv_values
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvboost import GenerationResult, KVBoost
from kvboost.core import percent

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Settings:
    model: str  # empty: the small model of scripts/get_model.py
    dtype: str
    device: str | None
    max_new_tokens: int


def read_settings(env_file: Path, environ: Mapping[str, str], model: str | None = None) -> Settings:
    """`model` wins over the environment, the environment over the file."""
    found = {**dotenv_values(env_file), **environ}
    return Settings(
        model=model or found.get("KVBOOST_MODEL") or "",
        dtype=found.get("KVBOOST_DTYPE") or "auto",
        device=found.get("KVBOOST_DEVICE") or None,
        max_new_tokens=int(found.get("KVBOOST_MAX_NEW_TOKENS") or 32),
    )


def make_engine(settings: Settings) -> KVBoost:
    name = settings.model
    if not name:
        sys.path.insert(0, str(ROOT / "scripts"))
        from get_model import get_model  # noqa: PLC0415

        name = str(get_model())
    return KVBoost.from_pretrained(name, device=settings.device, dtype=settings.dtype)


@dataclass(frozen=True)
class Row:
    """One prompt, with and without reuse."""

    on: GenerationResult
    off: GenerationResult

    @property
    def is_same(self) -> bool:
        return self.on.output_text == self.off.output_text

    def __str__(self) -> str:
        return (
            f"{self.on.cached_tokens} of {self.on.prompt_tokens} tokens reused, first token after "
            f"{self.on.ttft_ms:.0f} ms instead of {self.off.ttft_ms:.0f} ms"
        )


class Trial:
    """Runs the prompts of an example, shows each output, and records the figures."""

    def __init__(self, engine: KVBoost, console: Console, settings: Settings, *, is_demo: bool):
        self.max_new_tokens = settings.max_new_tokens
        self.rows: list[Row] = []
        self._engine, self._console, self._is_demo = engine, console, is_demo

    def ask(self, label: str, call: Callable[..., GenerationResult], reuse: str = "exact") -> str:
        """The output of `call(reuse=reuse)`, compared with `call(reuse="off")`."""
        self.say(label, "bold")
        # In turns, so that neither is always first. Runs without reuse store nothing.
        modes = (reuse, "off") if len(self.rows) % 2 else ("off", reuse)
        results = {}
        for mode in modes:
            with self._console.status(Text(f"{label} (reuse: {mode})")):
                self._engine.flush()  # storing the last K/V is not part of the time
                results[mode] = call(reuse=mode)
        row = Row(results[reuse], results["off"])
        self.rows.append(row)
        self.say(f"  {row.on.output_text.strip()}")
        if not row.is_same:
            self.say(f"  without reuse: {row.off.output_text.strip()}")
        self.say(f"  {row}", "dim")
        return row.on.output_text

    def say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False)

    def questions(self, scripted: Sequence[str]) -> Iterator[str]:
        """What the user types, until an empty line; without a terminal, the scripted questions."""
        if self._is_demo or not (sys.stdin.isatty() and self._console.is_terminal):
            yield from scripted
            return
        self.say("Your turn. An empty line quits.", "dim")
        with suppress(EOFError):  # Ctrl+D
            while line := self._console.input("> ").strip():
                yield line


def table(trials: Mapping[str, Trial], title: str) -> Table:
    """Medians of each example, without its first prompt, which is always cold."""
    note = "TTFT: time to first token; medians, without each first (cold) prompt"
    made = Table(title=title, caption=note, box=box.SIMPLE_HEAD)
    made.add_column("example", no_wrap=True)
    for heading in ("prompts", "tokens", "reused", "TTFT off", "TTFT on", "faster", "same"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, trial in trials.items():
        rows = trial.rows[1:] or trial.rows
        if not rows:
            continue
        off, on = (median(row.off.ttft_ms for row in rows), median(row.on.ttft_ms for row in rows))
        made.add_row(
            name,
            str(len(rows)),
            f"{median(row.on.prompt_tokens for row in rows):.0f}",
            percent(median(row.on.kv_reuse_ratio for row in rows), 1),
            f"{off:.0f} ms",
            f"{on:.0f} ms",
            f"{off / on:.1f}x",
            f"{sum(row.is_same for row in rows)} of {len(rows)}",
        )
    return made
