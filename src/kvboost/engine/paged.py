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
    blocks; how many that saves is in `paged_stats`. Everything else is as in `KVBoost`.

    Example:
        >>> from kvboost import CPUPagedEngine
        >>> engine = CPUPagedEngine(model, tokenizer, num_blocks=64)
        >>> prompts = ["The capital of France is", "The capital of Italy is"]
        >>> results = engine.generate_batch(prompts, max_new_tokens=2)
        >>> [result.output_text for result in results]
        [' Paris.', ' Rome.']
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
        """As `KVBoost`, with a pool of `num_blocks` blocks of `block_size` tokens.

        With `num_blocks=None` it has as many bytes as `max_cache_bytes`, at least 1 GiB.
        """
        options |= {"block_size": block_size, "num_blocks": num_blocks}
        super().__init__(model, tokenizer, backend="paged", **options)

    def paged_stats(self) -> dict[str, int]:
        """Tell blocks and bytes in use, blocks that sharing saves, and blocks copied so far.

        A block is copied when a request writes where others read. Returns at once.

        Example:
            >>> stats = engine.paged_stats()
            >>> stats["num_blocks"], stats["block_size"], stats["used_blocks"]
            (64, 16, 0)
        """
        pool = self._parts.pool
        assert isinstance(pool, BlockPool)
        return pool.stats()
