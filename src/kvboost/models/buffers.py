"""Buffers that no checkpoint holds, such as rotary frequencies, computed again from the config."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

# CPUs with AVX2 and with AVX-512 compute frequencies that differ in the last bits; GPUs may.
ROUNDING = 4 * torch.finfo(torch.float32).eps

log = logging.getLogger(__name__)


def changed_buffers(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of buffers that are in no checkpoint and do not follow from the config.

    Transformers' `_init_weights` computes buffers such as rotary frequencies when a model is built.
    Computed once more, they show whether somebody has changed them.
    """
    for path, module, names, expected in _uncovered(model):
        for name in names:
            buffer = module._buffers[name]  # noqa: SLF001
            if buffer is not None and not _is_same(buffer, expected.get(name)):
                yield f"{path}.{name}" if path else name, buffer


def _uncovered(
    model: PreTrainedModel,
) -> Iterator[tuple[str, torch.nn.Module, list[str], dict[str, torch.Tensor]]]:
    """Modules with buffers that are in no checkpoint: path, names, values by the config."""
    owners: dict[str, PreTrainedModel] = {}  # by path: the innermost model that a module is in
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        owner = module if isinstance(module, PreTrainedModel) else owners[parent]
        owners[path] = owner
        names = sorted(module._non_persistent_buffers_set)  # noqa: SLF001
        if names:
            yield path, module, names, _computed(owner, module)


def compute_buffers(model: PreTrainedModel) -> None:
    """Give a model without memory the buffers that no checkpoint holds."""
    for _, module, names, expected in _uncovered(model):
        for name in names:
            buffer = module._buffers[name]  # noqa: SLF001
            if buffer is not None and name in expected:
                module._buffers[name] = expected[name].to(buffer.dtype)  # noqa: SLF001


def _computed(owner: PreTrainedModel, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's buffers as computed from its config; empty if its code does not allow that."""
    buffers = {
        # As float32: frequencies that were rounded to 16 bits are other ones.
        name: torch.zeros(
            each.shape, dtype=torch.float32 if each.is_floating_point() else each.dtype
        )
        for name, each in module._buffers.items()  # noqa: SLF001
        if each is not None
    }
    weights = {
        name: None if each is None else torch.empty_like(each, device="meta")
        for name, each in module._parameters.items()  # noqa: SLF001
    }
    fresh = copy.copy(module)  # with nothing in it of the model's own
    fresh.__dict__ |= {"_buffers": buffers, "_parameters": weights, "_modules": {}}
    try:
        owner._init_weights(fresh)  # noqa: SLF001
    except Exception as error:  # the model's code, called out of its usual place
        log.info("buffers of %s are hashed as they are: %s", type(module).__name__, error)
        return {}
    return buffers


def _is_same(buffer: torch.Tensor, expected: torch.Tensor | None) -> bool:
    if expected is None:
        return False
    return torch.allclose(buffer.detach().cpu().to(expected.dtype), expected, rtol=ROUNDING, atol=0)
