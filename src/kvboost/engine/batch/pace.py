"""How many prompt tokens a step prefills beside running requests."""

from __future__ import annotations

MOST_TOKENS = 1024  # of prompts in a step while nobody waits for a next token
LEAST_TOKENS = 64  # beside decoding, so that a prompt always makes progress (ADR 38)
SHARED_STEP_S = 0.5  # of a step with prompts, if another tenant's request may arrive meanwhile
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

    def prompt_tokens(self, num_decoding: int, num_waiting: int, *, is_shared: bool) -> int:
        """The most prompt tokens for a step that also decodes for `num_decoding` requests.

        Without a target, prompts get a larger share while more requests wait for their first
        token than for their next one. If other tenants may come, steps are short: a newcomer waits
        for the end of one. Not much shorter than a pass over the weights pays for, though.
        """
        decode_s = self._decode_s or 0.0
        if self._token_s is None or (num_decoding and self._decode_s is None):
            return LEAST_TOKENS if num_decoding or is_shared else MOST_TOKENS
        if num_decoding == 0:
            room_s = max(SHARED_STEP_S, 4 * decode_s) if is_shared else float("inf")
        elif self._target_s is not None:
            room_s = self._target_s - decode_s
        else:
            share_s = PROMPT_SHARE * decode_s
            room_s = share_s * max(1.0, num_waiting / num_decoding)
            if is_shared:
                room_s = min(room_s, max(SHARED_STEP_S - decode_s, share_s))
        return int(min(MOST_TOKENS, max(LEAST_TOKENS, room_s / self._token_s)))

    def observe(self, seconds: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """Learn from a step. What a prompt token adds grows with the tokens before it."""
        if num_prompt_tokens == 0:
            self._decode_s = _recent(self._decode_s, seconds)
        elif num_prompt_tokens >= LEAST_TOKENS and (self._decode_s is not None or not num_decoding):
            added_s = max(seconds - (self._decode_s or 0.0), 0.01 * seconds)
            self._token_s = _recent(self._token_s, added_s / num_prompt_tokens)


def _recent(old: float | None, new: float) -> float:
    return new if old is None else old + RECENT * (new - old)
