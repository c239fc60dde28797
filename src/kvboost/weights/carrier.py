"""What brings weights to where they are computed with, and takes them away again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Tensors: TypeAlias = Sequence[torch.Tensor]


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
        """Whether a tensor's memory can be given up and its numbers brought again."""

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as it is best brought from."""
        return tensor

    @abstractmethod
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that stays, where forwards compute."""

    @abstractmethod
    def bring(self, tensors: Tensors) -> Brought:
        """Tensors to compute with, in memory or on their way."""

    @abstractmethod
    def drop(self, brought: Brought) -> None:
        """Give up the memory of what was brought."""

    @abstractmethod
    def await_arrival(self, brought: Brought) -> None:
        """Let the computing thread's next kernels wait until the tensors are there."""

    @abstractmethod
    def note_use(self, brought: Brought) -> None:
        """Remember the computing thread's last kernel on the tensors."""
