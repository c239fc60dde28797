"""Models that are certified once: that takes longer than most of what is asked of them then."""

from __future__ import annotations

from functools import cache

from kvboost.models.hf import HFModel
from tiny_models import SUPPORTED, build


@cache
def tiny_model(name: str) -> HFModel:
    """One for all tests of a process that do no more than run it."""
    return HFModel(build(*SUPPORTED[name]))
