"""What a run of the benchmark does."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvboost.errors import ConfigError

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Settings:
    """What a run does. A run that is resumed must have the same."""

    model: str
    gguf: str | None
    data: str | None
    dtype: str
    seed: int
    rounds: int
    num_tokens: int  # of the shared part of a prompt, about
    systems: tuple[str, ...]
    workloads: tuple[str, ...]
    questions: tuple[str, ...]
    is_quick: bool

    def shown(self) -> dict[str, Any]:
        """Without the folders of this machine; with the Python whose texts prompts are made of."""
        shown = asdict(self) | {"python": platform.python_version()}
        for name in ("model", "gguf", "data"):
            shown[name] = Path(shown[name]).name if shown[name] else None
        return shown


def check_same(settings: Settings, folder: Path) -> None:
    """Note the settings in the folder of a run.

    Raises:
        ConfigError: it has a run with others.
    """
    path = folder / SETTINGS
    shown = json.dumps(settings.shown(), indent=2) + "\n"
    if not path.exists():
        path.write_text(shown, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != shown:
        raise ConfigError(f"{folder} has a run with other settings: take another --out")
