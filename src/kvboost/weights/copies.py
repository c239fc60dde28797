"""Weights in the host's memory that are copied to a GPU as they are needed, and forgotten there."""

from __future__ import annotations

import logging

import torch

from kvboost.weights.carrier import Brought, Carrier, Tensors

log = logging.getLogger(__name__)


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
        """Forget the copies once the GPU is done with them: not before, or the budget is passed."""
        if brought.used is not None:
            brought.used.synchronize()
        brought.tensors = ()
