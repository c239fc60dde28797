"""How many prompt tokens a step may compute without making running answers wait too long."""

from __future__ import annotations

MOST_TOKENS = 1024  # of prompts in a step while nobody waits for a next token
LEAST_TOKENS, FIRST_TOKENS = 8, 48  # beside answers
SLOWER = 1.7  # the time of a step with prompts by that of one without, as it shall be
RECENT = 0.2  # weight of the newest measurement
CAUTION = 0.3  # how far one step changes the room for prompts
LEAST_CHANGE, MOST_CHANGE = 0.8, 1.25


class Pace:
    """Gives prompts more room as long as steps with them are fast enough, and less when not."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._room = float(FIRST_TOKENS)

    def prompt_tokens(self, num_decoding: int, num_waiting: int) -> int:
        """The most prompt tokens for a step beside `num_decoding` answers.

        Where more requests wait for their first token than for their next one, they may take
        more of a step.
        """
        if num_decoding == 0:
            return MOST_TOKENS
        return int(min(MOST_TOKENS, self._room * max(1.0, num_waiting / num_decoding)))

    def observe(self, seconds: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """Learn from a step.

        What a prompt token adds depends on all that stands before it, so the room follows the
        time of the steps, instead of a forecast.
        """
        if num_decoding == 0:
            return
        if num_prompt_tokens == 0:
            old = seconds if self._decode_s is None else self._decode_s
            self._decode_s = old + RECENT * (seconds - old)
        elif self._decode_s is not None and self._room / 2 <= num_prompt_tokens <= self._room:
            change: float = (SLOWER * self._decode_s / seconds) ** CAUTION
            self._room *= min(MOST_CHANGE, max(LEAST_CHANGE, change))
            self._room = min(MOST_TOKENS, max(LEAST_TOKENS, self._room))
