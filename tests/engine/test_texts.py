"""What callers hand in, as token ids."""

from __future__ import annotations

import pytest

from fake_serving import CharTokenizer
from kvboost.engine.texts import MOST_PLACES, tokens_of
from kvboost.errors import ConfigError


def test_documents_may_not_stand_in_a_prompt_without_end() -> None:
    text = "ab" * MOST_PLACES
    assert len(tokens_of(text, CharTokenizer(), ["a"])) == len(text)
    with pytest.raises(ConfigError, match="more than"):
        tokens_of(text + "a", CharTokenizer(), ["a"])
