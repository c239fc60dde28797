"""Is the cache of an OpenAI-compatible server right, fast and separate? Needs no model."""

from kvboost.probe.findings import Finding, Report
from kvboost.probe.session import run

__all__ = ["Finding", "Report", "run"]
