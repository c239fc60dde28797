"""Carriers: bring weights to the device that computes with them, and drop them again."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Tensors: TypeAlias = Sequence[torch.Tensor]

log = logging.getLogger(__name__)


@dataclass
class Brought:
    """Tensors to compute with; the events are a GPU's, which runs behind its host."""

    tensors: Tensors
    arrived: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None


class Carrier(ABC):
    """Brings and drops tensors, on the window's thread."""

    device: torch.device
    is_in_place: bool  # forwards compute on the model's own tensors

    @abstractmethod
    def can_drop(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be dropped and loaded again."""

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the memory that it is best loaded from."""
        return tensor

    @abstractmethod
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that stays, where forwards compute."""

    @abstractmethod
    def bring(self, tensors: Tensors) -> Brought:
        """Tensors to compute with, in memory or on their way."""

    @abstractmethod
    def drop(self, brought: Brought) -> None:
        """Free the memory of brought tensors."""

    @abstractmethod
    def await_arrival(self, brought: Brought) -> None:
        """Let the computing thread's next kernels wait until the tensors are there."""

    @abstractmethod
    def note_use(self, brought: Brought) -> None:
        """Remember the computing thread's last kernel on the tensors."""


class DeviceCopies(Carrier):
    """Copies tensors to a device, on a stream of its own where the device has streams."""

    is_in_place = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def can_drop(self, tensor: torch.Tensor) -> bool:
        """Always: the host keeps the numbers."""
        return True

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory, which a GPU reads by itself; the tensor if there is no room."""
        if self._stream is None:
            return tensor
        try:
            return tensor.pin_memory()
        except RuntimeError as error:
            log.warning("weights stay in pageable memory, which is slower: %s", error)
            return tensor

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that stays."""
        return tensor.to(self.device, copy=True)

    def bring(self, tensors: Tensors) -> Brought:
        """Start copying; memory that is not pinned is copied at once."""
        if self._stream is None:
            return Brought([self.place(tensor) for tensor in tensors])
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
            return Brought(copies, arrived=self._stream.record_event())

    def await_arrival(self, brought: Brought) -> None:
        """Let the current stream wait for the copies."""
        if brought.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(brought.arrived)

    def note_use(self, brought: Brought) -> None:
        """Mark the current stream's last kernel."""
        if self._stream is not None:
            brought.used = torch.cuda.current_stream(self.device).record_event()

    def drop(self, brought: Brought) -> None:
        """Free the copies once the GPU is done with them; before, the budget would be exceeded."""
        if brought.used is not None:
            brought.used.synchronize()
        brought.tensors = ()
