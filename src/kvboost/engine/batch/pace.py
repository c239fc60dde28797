"""How many prompt tokens a step may compute without making running answers wait too long."""

from __future__ import annotations

MOST_TOKENS = 1024  # of prompts in a step while nobody waits for a next token
LEAST_TOKENS = 16
FIRST_TOKENS = 64  # before anything was measured
EXTRA = 0.6  # of a step's own time that prompts may add to it
RECENT = 0.2  # weight of the newest measurement


class Pace:
    """Learns from each step what decoding takes and what a prompt token adds."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def prompt_tokens(self, num_decoding: int, num_waiting: int) -> int:
        """The most prompt tokens for a step beside `num_decoding` answers.

        Where more requests wait for their first token than for their next one, they may take
        more of a step.
        """
        if num_decoding == 0:
            return MOST_TOKENS
        if self._decode_s is None or self._token_s is None:
            return FIRST_TOKENS
        share = EXTRA * max(1.0, num_waiting / num_decoding)
        wanted = share * self._decode_s / self._token_s
        return int(min(MOST_TOKENS, max(LEAST_TOKENS, wanted)))

    def observe(self, seconds: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """Learn from a step."""
        if num_prompt_tokens == 0:
            self._decode_s = _mixed(self._decode_s, seconds)
        elif num_decoding == 0:
            self._token_s = _mixed(self._token_s, seconds / num_prompt_tokens)
        elif self._decode_s is not None:
            added_s = max(seconds - self._decode_s, 0.1 * self._decode_s)
            self._token_s = _mixed(self._token_s, added_s / num_prompt_tokens)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + RECENT * (new - old)
