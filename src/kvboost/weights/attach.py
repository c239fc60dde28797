"""How a module computes with streamed weights. Each function returns what undoes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from kvboost.weights.carrier import Tensors
from kvboost.weights.window import Piece

Use: TypeAlias = Callable[[Piece], AbstractContextManager[Tensors]]
Undo: TypeAlias = Callable[[], object]


def attach_whole(module: torch.nn.Module, names: Sequence[str], part: Piece, use: Use) -> Undo:
    """Load all large tensors of a module while it runs."""
    open_uses: list[AbstractContextManager[Tensors]] = []
    absent = [getattr(module, name).data for name in names]

    def fill(tensors: Tensors) -> None:
        for name, tensor in zip(names, tensors, strict=True):
            getattr(module, name).data = tensor

    def before(_module: torch.nn.Module, _args: Any) -> None:
        leave()  # what an interrupted forward left: no hook is called for KeyboardInterrupt
        use_now = use(part)
        fill(use_now.__enter__())
        open_uses.append(use_now)

    def after(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
        leave()

    def leave() -> None:
        if open_uses:
            fill(absent)
            open_uses.pop().__exit__(None, None, None)

    hooks = (
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def attach_parts(linear: torch.nn.Linear, parts: Sequence[Piece], use: Use) -> Undo:
    """Compute a linear layer some rows of its weight at a time."""
    bias = linear.bias
    sizes = [part.source[0].shape[0] for part in parts]
    biases = [None] * len(parts) if bias is None else torch.split(bias, sizes)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        outputs = []
        for part, its_bias in zip(parts, biases, strict=True):
            with use(part) as (weight,):
                outputs.append(F.linear(hidden, weight, its_bias))
                del weight  # or it would outlive its use
        return torch.cat(outputs, dim=-1)

    linear.forward = forward  # type: ignore[method-assign,assignment]
    return lambda: delattr(linear, "forward")


def attach_rows(
    embedding: torch.nn.Module,
    look_up: Callable[[torch.Tensor], torch.Tensor],
    num_at_once: int,
    drop: Callable[[], None],
) -> Undo:
    """Look up a few embeddings at a time: each of them may map a whole large page."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        found = []
        for some in torch.split(ids.reshape(-1), num_at_once):
            found.append(look_up(some))
            drop()
        return torch.cat(found).reshape(*ids.shape, -1)

    embedding.forward = forward
    return lambda: delattr(embedding, "forward")
