"""`CPUPagedEngine`: the engine with the K/V of running requests in blocks of one pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvboost.engine.engine import KVBoost
from kvboost.models.paged import BlockPool

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class CPUPagedEngine(KVBoost):
    """`KVBoost(..., backend="paged")`, by the name of the original package.

    Requests that `submit` and `generate_batch` compute together hold what they share in the same
    blocks; how many that saves is in `paged_stats`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        **options: Any,
    ) -> None:
        """As `KVBoost`, with a pool of `num_blocks` blocks of `block_size` tokens."""
        options |= {"block_size": block_size, "num_blocks": num_blocks}
        super().__init__(model, tokenizer, backend="paged", **options)

    def paged_stats(self) -> dict[str, int]:
        """Blocks and bytes in use, blocks that sharing saves, and blocks copied on write so far."""
        pool = self._parts.pool
        assert isinstance(pool, BlockPool)
        return pool.stats()
