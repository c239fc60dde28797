"""How many prompt tokens a step prefills beside running answers."""

from __future__ import annotations

MOST_TOKENS = 1024  # of prompts in a step while nobody waits for a next token
LEAST_TOKENS = 64  # beside answers, so that a prompt always gets on (ADR 38)
PROMPT_SHARE = 1.0  # default target: time for prompts in a step by the time of its decoding
RECENT = 0.2  # weight of the newest measurement


class Pace:
    """Fills each step up to the inter-token target, as measured on the steps before.

    Without a target, prompts get a share of each step in proportion to its decoding time.
    """

    def __init__(self, target_ms: int | None = None) -> None:
        self._target_s = None if target_ms is None else target_ms / 1e3
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def prompt_tokens(self, num_decoding: int, num_waiting: int) -> int:
        """The most prompt tokens for a step beside `num_decoding` answers.

        Without a target, prompts get a larger share while more requests wait for their first
        token than for their next one.
        """
        if num_decoding == 0:
            return MOST_TOKENS
        if self._decode_s is None or self._token_s is None:
            return LEAST_TOKENS
        if self._target_s is None:
            room_s = PROMPT_SHARE * self._decode_s * max(1.0, num_waiting / num_decoding)
        else:
            room_s = self._target_s - self._decode_s
        return int(min(MOST_TOKENS, max(LEAST_TOKENS, room_s / self._token_s)))

    def observe(self, seconds: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """Learn from a step. What a prompt token adds grows with the tokens before it."""
        if num_decoding == 0:
            return
        if num_prompt_tokens == 0:
            self._decode_s = _recent(self._decode_s, seconds)
        elif self._decode_s is not None:
            added_s = max(seconds - self._decode_s, 0.01 * seconds)
            self._token_s = _recent(self._token_s, added_s / num_prompt_tokens)


def _recent(old: float | None, new: float) -> float:
    return new if old is None else old + RECENT * (new - old)
