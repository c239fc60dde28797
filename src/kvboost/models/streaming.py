"""Text as it is generated, through Transformers' own incremental detokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from transformers import TextStreamer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextCallback(TextStreamer):
    """Calls `emit` with each piece of text; the pieces add up to the answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._emit = emit

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: FBT001, FBT002
        """Pass the piece on; Transformers sends an empty one at the end."""
        if text:
            self._emit(text)
