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
BLOCK_NUMBERS = 1 << 21  # of a weight that are unpacked at once: they stay in a core's cache

# Of the 8 columns in a word, those in the lower and in the upper halves of its 4 bytes.
HALVES = ((0, [0, 4, 1, 5]), (4, [2, 6, 3, 7]))


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
        num_words = self.out_features // 8
        step = max(1, BLOCK_NUMBERS // self.in_features // 8)
        output = hidden.new_empty(*hidden.shape[:-1], num_words, 8)
        for start in range(0, num_words, step):
            words = slice(start, start + step)
            packed = self.qweight[:, words].contiguous().view(torch.uint8)
            for shift, columns in HALVES:
                weight = self._dequantised(packed, words, shift, columns, hidden.dtype)
                product = hidden @ weight
                output[..., words, columns] = product.view(*product.shape[:-1], -1, 4)
        output = output.view(*hidden.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def _dequantised(
        self,
        packed: torch.Tensor,
        words: slice,
        shift: int,
        columns: list[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The weight of half of the columns of some words, in the order of their nibbles."""
        zeros = self.qzeros[:, words].contiguous().view(torch.uint8) >> shift & 15
        scales = self.scales.view(len(self.scales), -1, 8)[:, words, columns].flatten(1)
        numbers = (packed >> shift & 15).view(torch.int8).view(len(scales), self.group_size, -1)
        numbers -= zeros.view(torch.int8)[:, None]
        kind = torch.promote_types(scales.dtype, dtype)  # wide enough to round once
        weight = numbers.to(kind) * scales.to(kind)[:, None]
        return weight.to(dtype).view(self.in_features, -1)


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
