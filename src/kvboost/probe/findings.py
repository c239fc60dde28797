"""What a probe found: lights, sentences and figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Light = Literal["green", "yellow", "red", "grey"]
AREAS = ("right", "fast", "separate", "gain")
ORDER: tuple[Light, ...] = ("red", "yellow", "grey", "green")


@dataclass(frozen=True)
class Finding:
    """One answer to one question about a server.

    red: wrong. yellow: worth knowing, or not what an operator expects. grey: could not be told.
    """

    area: str  # right, fast, separate or gain
    name: str
    light: Light
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All findings about a server, and what they cost."""

    url: str
    model: str
    findings: tuple[Finding, ...]
    num_requests: int
    num_tokens: int
    seconds: float

    @property
    def light(self) -> Light:
        """The worst of all lights."""
        return next((x for x in ORDER if any(f.light == x for f in self.findings)), "grey")

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.light != "red"

    def finding(self, name: str) -> Finding | None:
        """The finding of that name."""
        return next((each for each in self.findings if each.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self) | {"light": self.light, "ok": self.ok}
