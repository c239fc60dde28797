"""Arguments of Transformers' `generate()` -> sampling of the batch, where it can do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvboost.core import Sampling
from kvboost.models.hf import HFModel

# Names of Transformers that the batch applies as Transformers does.
APPLIED = (
    "do_sample",
    "max_new_tokens",
    "min_p",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
DEFAULT_TOP_K = 50  # of Transformers, when it samples


def sampling_of(arguments: Mapping[str, Any], model: HFModel) -> Sampling | None:
    """The same as `arguments` on top of the model's generation config, or None if it is not."""
    if set(arguments) - set(APPLIED) or model.special_settings() - set(APPLIED):
        return None
    values = {name: model.setting(name, dict(arguments)) for name in APPLIED}
    if values["max_new_tokens"] is None:
        return None
    common = Sampling(
        max_new_tokens=values["max_new_tokens"],
        repetition_penalty=values["repetition_penalty"] or 1.0,
    )
    if not values["do_sample"]:
        return common
    top_k = DEFAULT_TOP_K if values["top_k"] is None else values["top_k"]
    return replace(
        common,
        temperature=1.0 if values["temperature"] is None else values["temperature"],
        top_k=top_k,
        top_p=1.0 if values["top_p"] is None else values["top_p"],
        min_p=values["min_p"] or 0.0,
    )
