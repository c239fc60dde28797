"""Copies between host memory and a device for which the computing thread does not wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Numbers = Sequence[int] | npt.NDArray[np.int64]


def upload(device: torch.device, *numbers: Numbers) -> list[torch.Tensor]:
    """Whole numbers as tensors on a device, by one asynchronous copy."""
    parts = [np.asarray(each, np.int64) for each in numbers]
    together = sent(torch.from_numpy(np.concatenate(parts)), device)
    return list(torch.split(together, [len(each) for each in parts]))


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; host memory is pinned first, so that the copy is asynchronous."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class PerDevice:
    """Tensors, or masks, on every device that a forward comes to: each is sent there once."""

    def __init__(self, home: torch.device, *tensors: Any) -> None:
        """`home`: where they are now."""
        self._home, self._sent = home, {home: tensors}

    def on(self, device: torch.device) -> tuple[Any, ...]:
        """These tensors there."""
        if device not in self._sent:
            there = (each.to(device, non_blocking=True) for each in self._sent[self._home])
            self._sent[device] = tuple(there)
        return self._sent[device]


@contextmanager
def beside(devices: Sequence[torch.device]) -> Iterator[None]:
    """Copies inside run beside the kernels of other threads, and are done at the end.

    They come after all kernels that were launched before.
    """
    with ExitStack() as stack:
        for device in {each for each in devices if each.type == "cuda"}:
            stream = _stream(device, threading.get_ident())
            stack.callback(stream.synchronize)
            stream.wait_stream(torch.cuda.current_stream(device))
            stack.enter_context(torch.cuda.stream(stream))
        yield


def follow(devices: Sequence[torch.device]) -> None:
    """Let copies `beside` the model come after all kernels that it has launched by now."""
    for device in {each for each in devices if each.type == "cuda"}:
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


@cache
def _stream(device: torch.device, thread: int) -> Any:
    """A thread's own stream: the memory of what passed through a stream stays with it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory; of a device, a copy that is there once its stream is done."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
