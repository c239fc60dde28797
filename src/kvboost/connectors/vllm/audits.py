"""Audits: an answer on moved text beside the same answer on rows computed in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvboost.connectors.vllm.messages import Audit, Verdict

if TYPE_CHECKING:
    from kvboost.connectors.vllm.sparse import SparseModel

AUDIT_TOKENS = 128  # computed at once: a request that comes meanwhile waits for no more


class AuditUnderWay:
    """An audit that is carried out step by step."""

    def __init__(self, sparse: SparseModel, audit: Audit) -> None:
        self.audit = audit
        self.exact_stop = audit.exact_stop  # rows before this one are exact by now
        self._steps = compared(sparse, audit)

    def advance(self) -> Verdict | None:
        """Carry out a step; the last one has the verdict."""
        found = next(self._steps)
        if isinstance(found, Verdict):
            self.exact_stop = len(self.audit.tokens) - 1
            return found
        self.exact_stop = found
        return None


def compared(sparse: SparseModel, audit: Audit) -> Iterator[int | Verdict]:
    """Compute an answer's logits on the rows it was made from, then on rows computed in full.

    Step by step: each yields the number of rows that are exact so far, the last one the verdict.
    """
    tokens, first, stop = audit.tokens, audit.num_prompt - 1, len(audit.tokens) - 1
    answer, count = range(first, stop), stop - first

    def logits() -> torch.Tensor:
        rest = tokens[first:stop]
        return sparse.forward(rest, answer, audit.block_ids, num_logits=count).float()

    reused = logits().log_softmax(-1)
    for start in range(audit.exact_stop, first, AUDIT_TOKENS):
        piece = range(start, min(start + AUDIT_TOKENS, first))
        sparse.forward(tokens[start : piece.stop], piece, audit.block_ids)
        yield piece.stop
    full = logits().log_softmax(-1)
    kl = (full.exp() * (full - reused)).sum(-1).clamp_min(0).mean()
    same = (full.argmax(-1) == reused.argmax(-1)).float().mean()
    yield Verdict(audit.request_id, float(kl), float(same))
