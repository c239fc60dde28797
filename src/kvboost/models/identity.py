"""What names a model's K/V, for an engine that runs the model without Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvboost.core import KVGeometry
from kvboost.errors import UnsupportedModel
from kvboost.models.certify import cached_tensors, position_limit, rotary_frequencies
from kvboost.models.fingerprint import fingerprint


@dataclass(frozen=True)
class Identity:
    """The name that Transformers' engine gives a model's K/V, and what there is to know it by."""

    fingerprint: bytes
    frequencies: frozenset[tuple[float, ...]]  # at which its keys may turn
    planes: torch.Tensor  # [planes, heads, tokens, head_dim] of the probe tokens


def identify(
    name: str, dtype: torch.dtype, geometry: KVGeometry, probe: list[int], **arguments: Any
) -> Identity:
    """Load a model in host memory, where its weights are mapped from their files, and run `probe`.

    Raises:
        UnsupportedModel: engines do not agree on the positions of such a model.
    """
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **arguments).eval()
    if position_limit(model) is not None:
        raise UnsupportedModel("its rotary embedding changes with the length of a prompt")
    with torch.no_grad():
        found = dict(cached_tensors(model, torch.tensor([probe]), range(len(probe))))
    planes = torch.cat([found[plane] for plane in sorted(found)])
    return Identity(fingerprint(model, geometry), frozenset(rotary_frequencies(model)), planes)
