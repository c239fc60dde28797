"""`CPUPagedEngine`: the engine with the K/V of running requests in blocks of one pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvboost.engine.engine import KVBoost

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from kvboost.config import OptionValues


class CPUPagedEngine(KVBoost):
    """`KVBoost(..., backend="paged")` under the name of the original package.

    Requests in one batch share the blocks of common text; `paged_stats` counts the blocks saved.
    Everything else is as in `KVBoost`.

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
        adapters: Mapping[str, str] | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        """Build an engine with a pool of `num_blocks` blocks of `block_size` tokens.

        Args:
            model: See `KVBoost`.
            tokenizer: See `KVBoost`.
            adapters: See `KVBoost`.
            **options: See `KVBoost`; `backend` is always "paged".
        """
        own: Any = options
        super().__init__(model, tokenizer, adapters=adapters, backend="paged", **own)

    def paged_stats(self) -> dict[str, int]:
        """Blocks and bytes in use, cached, free and saved by sharing; returns at once.

        Example:
            >>> stats = engine.paged_stats()
            >>> stats["num_blocks"], stats["block_size"], stats["used_blocks"]
            (64, 16, 0)
        """
        return self._parts.pool.stats()
