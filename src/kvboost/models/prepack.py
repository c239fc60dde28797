"""Weights of linear layers in oneDNN's own layout, for batches on CPUs.

Given plain weights, oneDNN rearranges them in every call. A second copy that is rearranged once
makes the linear layers of a step with 8 to 64 tokens 1.5 to 1.8 times as fast in bfloat16
(docs/research-log.md); a lone token gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kvboost.errors import ConfigError
from kvboost.weights.stream import streamed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_TOKENS = 4


def prepack(model: PreTrainedModel) -> Callable[[], None]:
    """Give every linear layer a rearranged copy of its weight; returns what undoes it.

    Raises:
        ConfigError: there is nothing to gain for this model on this machine.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        raise ConfigError(
            "prepack_weights=True is for bfloat16 on a CPU, "
            f"not for {str(model.dtype).removeprefix('torch.')} on {model.device.type}"
        )
    if streamed(model) is not None:
        raise ConfigError("prepack_weights=True keeps all weights in memory; they are streamed")
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        raise ConfigError("prepack_weights=True needs a torch that was built with oneDNN")
    linears = [each for each in model.modules() if type(each) is torch.nn.Linear]
    for linear in linears:
        linear.forward = _packed_forward(linear)  # type: ignore[method-assign,assignment]

    def undo() -> None:
        for linear in linears:
            del linear.forward

    return undo


def _packed_forward(linear: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = linear.weight, linear.bias
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)  # noqa: SLF001

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.numel() < LEAST_TOKENS * hidden.shape[-1]:
            return F.linear(hidden, weight, bias)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            hidden, packed, bias, "none", [], ""
        )
        return output

    return forward
