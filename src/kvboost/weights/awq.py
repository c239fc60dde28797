"""AWQ checkpoints: linear layers in 4 bits, computed with by Transformers' own model classes.

The layout is that of AWQ's "GEMM" files. `qweight` [in, out / 8] has 8 numbers of a row in each
int32, `qzeros` [groups, out / 8] the same for the zero points, `scales` [groups, out] is float16;
weight[i, o] = (q[i, o] - zero[i // group_size, o]) * scale[i // group_size, o].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AwqConfig
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

METHOD = "kvboost_awq"
# Numbers of a weight that are unpacked at once: on CPUs they stay in a core's cache, on devices
# launches cost more.
BLOCK_NUMBERS, DEVICE_NUMBERS = 1 << 20, 1 << 26

NIBBLES = 2, -1, 2, 2
"""Of unpacked columns: half of a byte, word, pair of bytes, byte of it.

The column in its word is 4 * byte + 2 * half + pair.
"""


class AWQLinear(torch.nn.Module):
    """A linear layer that is unpacked while it is computed, a block of columns at a time."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: torch.nn.Linear, group_size: int) -> None:
        """Buffers for the packed weight of `linear`; group_size -1: a group for each column."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group_size = linear.in_features if group_size == -1 else group_size
        if self.in_features % self.group_size or self.out_features % 8:
            raise ConfigError(
                f"AWQ: {self.in_features} x {self.out_features} is not a multiple of groups of "
                f"{self.group_size} x 8"
            )
        num_groups, num_words = self.in_features // self.group_size, self.out_features // 8
        shapes = {"qweight": self.in_features, "qzeros": num_groups}
        for name, num_rows in shapes.items():
            self.register_buffer(name, torch.empty(num_rows, num_words, dtype=torch.int32))
        scales = torch.empty(num_groups, self.out_features, dtype=torch.float16)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.data)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From [..., in] to [..., out]."""
        shape, num_words = hidden.shape[:-1], self.out_features // 8
        most = BLOCK_NUMBERS if hidden.device.type == "cpu" else DEVICE_NUMBERS
        step = max(1, most // self.in_features // 8)
        output = hidden.new_empty(*shape, num_words, 2, 2, 2)
        for start in range(0, num_words, step):
            words = slice(start, start + step)
            product = hidden @ self._dequantised(words, hidden.dtype)
            output[..., words, :, :, :] = product.view(*shape, *NIBBLES).movedim((-4, -2), (-2, -1))
        output = output.view(*shape, self.out_features)
        return output if self.bias is None else output + self.bias

    def _dequantised(self, words: slice, dtype: torch.dtype) -> torch.Tensor:
        """The weight [in, out] of the columns of some words, in the order of their nibbles."""
        numbers, zeros = _unpacked(self.qweight[:, words]), _unpacked(self.qzeros[:, words])
        kind = torch.promote_types(self.scales.dtype, dtype)  # wide enough to round once
        scales = self.scales.view(len(zeros), -1, 2, 2, 2)[:, words]
        scales = scales.permute(0, 3, 1, 4, 2).flatten(1).to(kind)
        numbers = numbers.view(len(zeros), self.group_size, -1).sub_(zeros[:, None])
        weight = torch.empty_like(numbers, dtype=dtype)
        return torch.mul(numbers, scales[:, None], out=weight).view(self.in_features, -1)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The numbers [rows, 8 * words] of packed words: all lower nibbles, then all upper ones."""
    halves = packed.contiguous().view(torch.uint8)
    numbers = halves.new_empty(len(packed), 2, halves.shape[1])
    torch.bitwise_and(halves, 15, out=numbers[:, 0])
    torch.bitwise_right_shift(halves, 4, out=numbers[:, 1])
    return numbers.view(torch.int8).flatten(1)


def use_own_awq(config: PreTrainedConfig) -> bool:
    """Let an AWQ checkpoint be loaded as it is stored, where `config` is of one."""
    settings = getattr(config, "quantization_config", None)
    if not isinstance(settings, dict) or settings.get("quant_method") != "awq":
        return False
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4 or version != "gemm" or not settings.get("zero_point", True):
        raise ConfigError(
            f"AWQ with bits={bits}, version={version!r}, zero_point="
            f"{settings.get('zero_point')}: expected 4 bits, 'gemm' and zero points"
        )
    config.quantization_config = settings | {"quant_method": METHOD}
    return True


@register_quantization_config(METHOD)
class OwnAwqConfig(AwqConfig):
    """Settings of an AWQ checkpoint that Transformers hands to `OwnAwqQuantizer`."""

    def __init__(self, **settings: Any) -> None:
        settings.pop("quant_method", None)
        super().__init__(**settings)
        self.quant_method = METHOD


@register_quantizer(METHOD)
class OwnAwqQuantizer(HfQuantizer):
    """Puts `AWQLinear` in place of linear layers before Transformers loads the weights."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        settings = self.quantization_config
        kept = self.get_modules_to_not_convert(
            model, settings.modules_to_not_convert, add_default_skips=True
        )
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and should_convert_module(name, kept):
                with torch.device("meta"):
                    packed = AWQLinear(module, settings.group_size)
                model.set_submodule(name, packed)

    def is_serializable(self) -> bool:
        """Not supported."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Its weights are whole numbers."""
        return False
