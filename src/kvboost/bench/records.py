"""Lines of JSON in files: what was measured is kept as it comes, and read again after a stop."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

Line: TypeAlias = dict[str, Any]


def read(path: Path) -> list[Line]:
    """All whole lines of a file; none if there is no such file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def append(path: Path, lines: Iterable[Line]) -> None:
    """Add lines. What a stop leaves of a line is not read, and is cut off before the next."""
    _cut_torn_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def write(path: Path, lines: Iterable[Line]) -> None:
    """Write a file anew."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            path.write_bytes(data[: data.rfind(b"\n") + 1])
