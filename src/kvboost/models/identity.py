"""What names a model's K/V, for an engine that runs the model without Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvboost.core import KVGeometry
from kvboost.models.certify import rotary_frequencies
from kvboost.models.fingerprint import fingerprint


@dataclass(frozen=True)
class Identity:
    """The fingerprint that Transformers' engine gives a model, and how fast its keys may turn."""

    fingerprint: bytes
    frequencies: frozenset[tuple[float, ...]]


def identify(name: str, dtype: torch.dtype, geometry: KVGeometry, **arguments: Any) -> Identity:
    """Read a model's weights once, in host memory (where they are mapped from their files)."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **arguments)
    return Identity(fingerprint(model, geometry), frozenset(rotary_frequencies(model)))
