"""Measurements of placed K/V in a few layers, by which repair strategies select."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvboost.core import LONGEST_QUESTION, MatchKind, ReusePlan
from kvboost.models import attention
from kvboost.models.pool import KeyValue
from kvboost.models.rows import Rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvboost.models.hf import HFModel
    from kvboost.models.packed import RowObserver

# Layer 0 depends on the token alone; context first shows in layer 1.
DEVIATION_LAYER = 1

# Beyond this many tokens the first layers are computed for every n-th token only.
MOST_PROBED = 8192


class _Enough(Exception):
    """Ends a forward whose later layers nobody needs."""


class Probe:
    """Evidence for a repair strategy; see `kvboost.reuse.repair.Evidence`."""

    def __init__(self, model: HFModel, rows: Rows, tokens: Sequence[int], plan: ReusePlan) -> None:
        self.tokens = tokens
        self._model, self._rows, self._plan = model, rows, plan

    def deviation(self) -> npt.NDArray[np.float32]:
        """How far K and V of layer 1 are from what the model computes here, relative to their size.

        Costs the first layer and a half for all tokens that are not exact.
        """
        exact = [match.span.stop for match in self._plan.matches if match.kind is MatchKind.EXACT]
        start, stop = max(exact, default=0), self._plan.num_tokens
        every = -(-(stop - start) // MOST_PROBED)
        positions = sorted({*range(start, stop, every), *self._live()})
        scores = np.zeros(stop, np.float32)

        def look(layer: int, fresh: KeyValue, stored: KeyValue) -> None:
            if layer < DEVIATION_LAYER:
                return
            total = torch.zeros(len(positions))
            for new, old in zip(fresh, stored, strict=True):
                placed = old[0, :, positions].float()
                size = placed.pow(2).sum(-1).mean().clamp_min(1e-12)
                total += ((new[0].float() - placed).pow(2).sum(-1) / size).sum(0).cpu()
            scores[positions] = total.numpy()
            raise _Enough

        self._run(positions, look)
        sampled = np.repeat(scores[start::every], every)[: stop - start]
        scores[start:] = np.maximum(scores[start:], sampled)
        return scores

    def attention(self) -> npt.NDArray[np.float32]:
        """How much the tokens after the last match look at each position, over middle layers.

        Costs a forward of the live tokens through two thirds of the layers.
        """
        num_layers, stop = self._model.geometry.num_layers, self._plan.num_tokens
        last = 2 * num_layers // 3
        wanted = set(range(num_layers // 3, last + 1, max(1, num_layers // 12))) | {last}
        num_asking = min(len(self._plan.live[-1]), LONGEST_QUESTION)
        scores = torch.zeros(stop)

        def look(module: Any, query: torch.Tensor, key: torch.Tensor) -> None:
            layer = getattr(module, "layer_idx", 0)
            if layer in wanted:
                scores.add_(_attention_received(query[0, :, -num_asking:], key[0]).cpu())
            if layer >= last:
                raise _Enough

        with attention.observed_by(look):
            self._run(self._live())
        return scores.numpy()

    def _live(self) -> list[int]:
        return [p for span in self._plan.live for p in range(span.start, span.stop)]

    def _run(self, positions: Sequence[int], observer: RowObserver | None = None) -> None:
        tokens = [self.tokens[position] for position in positions]
        length = self._rows.length
        with suppress(_Enough):
            self._model.forward(self._rows, tokens, positions, observer=observer)
        self._rows.length = length


def _attention_received(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mean attention of the last tokens [heads, queries, dim] on all rows [kv_heads, rows, dim]."""
    num_queries, num_rows = query.shape[1], key.shape[1]
    key = key.float().repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    scores = query.float() @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    last = torch.arange(num_rows - num_queries, num_rows, device=key.device)
    hidden = torch.arange(num_rows, device=key.device) > last[:, None]
    received: torch.Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1).mean((0, 1))
    return received
