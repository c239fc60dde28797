"""Is the cache fast? Times to first token, new and from the cache, and what an edit costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from kvboost.probe.client import REFUSED, BudgetSpent, Reply, RequestFailed, Server
from kvboost.probe.findings import Finding, Light
from kvboost.probe.statistics import sign_p
from kvboost.probe.texts import Document, Texts

FIRST_WORDS, MOST_WORDS = 200, 3200
LONG_ENOUGH_S = 0.8  # a prefill that long stands out from any noise
FAST = 0.8  # of a new prompt's time: a hit
SLOW = 1.05  # of a new prompt's time: no gain, but a loss,
LEAST_S = 0.005  # if it is also that much: below, nobody notices, and noise decides
CLEAR, LIKELY = 0.005, 0.05  # by chance
GROWS, SEEN_S = 1.3, 0.05  # against a prompt of a quarter: prefill can be seen
MOSTLY, LITTLE = 0.5, 0.1  # of a prompt's tokens
MUCH_SLOWER = 1.2  # than a new prompt,
LEAST_LONG = 6  # if so many were asked
LEAST_PAIRS = 3  # of the longest prompts: a median that one late answer does not change
MOST_EDITED = 2  # documents
MAX_TOKENS = 4
LAST_EDIT = "an edit at the end"
EDITS = {
    "end": LAST_EDIT,
    "middle": "an edit in the middle",
    "beginning": "an edit at the beginning",
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "a city"}}}}}
    for name, text in (("weather", "The weather of a city."), ("clock", "The time in a city."))
]  # fmt: skip


@dataclass
class Pair:
    """A document that was asked about twice."""

    document: Document
    new: Reply
    again: Reply


@dataclass
class Fast:
    """One check of a server's times; findings are of what was asked so far."""

    server: Server
    texts: Texts
    pairs: dict[int, list[Pair]] = field(default_factory=dict)  # by number of words
    edits: dict[str, list[Reply]] = field(default_factory=dict)
    failures: list[RequestFailed] = field(default_factory=list)

    def run(self, num_pairs: int) -> None:
        """Ask until done or until the budget is spent."""
        try:
            longest = self._find_length()
            for _ in range(num_pairs):
                for num_words in (longest, longest // 2, longest // 4):
                    self._ask_twice(num_words)
            self._ask_edited(self.pairs[longest][:MOST_EDITED])
            self._ask_variants()
        except BudgetSpent:
            pass
        except RequestFailed as error:
            self.failures.append(error)

    @property
    def longest(self) -> int:
        """Words of the longest prompts that were asked twice."""
        return max(self.pairs, default=0)

    def findings(self, others: Sequence[tuple[float, float]] = ()) -> list[Finding]:
        """All of them; `others` are more times of prompts, new and again."""
        if not self.pairs:
            why = self.failures[0] if self.failures else "the server is too slow for the time given"
            return [Finding("fast", "hits", "grey", f"Times were not measured: {why}.")]
        return [self._hits(others), self._usage(), self._break_even(), self._kept()]

    def _find_length(self) -> int:
        """Words of a prompt whose prefill stands out, or the longest that the server takes."""
        num_words, before = FIRST_WORDS, None
        least_s = self.server.ask(f"Hello {self.texts.salt()}", MAX_TOKENS).ttft_s
        while True:
            try:
                new = [self.texts.document(num_words).prompt for _ in range(2)]
                quickest = min(self.server.ask(each, MAX_TOKENS).ttft_s for each in new)
            except RequestFailed as error:
                if before is None or error.status not in REFUSED:
                    raise
                return before
            if quickest - least_s >= LONG_ENOUGH_S or 2 * num_words > MOST_WORDS:
                return num_words
            before, num_words = num_words, 2 * num_words

    def _ask_twice(self, num_words: int) -> None:
        document = self.texts.document(num_words)
        new = self.server.ask(document.prompt, MAX_TOKENS)
        again = self.server.ask(document.prompt, MAX_TOKENS)
        self.pairs.setdefault(num_words, []).append(Pair(document, new, again))

    def _ask_edited(self, pairs: Sequence[Pair]) -> None:
        for pair in pairs:
            chance = self.texts.chance
            edited = {name: pair.document.edited(where, chance) for where, name in EDITS.items()}
            edited["the question moved to the front"] = pair.document.question_first()
            for name, prompt in edited.items():
                self.server.ask(pair.document.prompt, MAX_TOKENS)  # small caches hold one prompt
                self._add(name, self.server.ask(prompt, MAX_TOKENS))

    def _ask_variants(self) -> None:
        """Switch what templates put before a prompt; servers that refuse it are skipped."""
        thinks = [{"chat_template_kwargs": {"enable_thinking": on}} for on in (True, False)]
        variants: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
            ("tools in another order", {"tools": TOOLS}, {"tools": TOOLS[::-1]}),
            ("reasoning switched off", thinks[0], thinks[1]),
        )
        for name, first, second in variants:
            prompt = self.texts.document(self.longest).prompt
            try:
                self._with(first).ask(prompt, MAX_TOKENS)
                self._add(name, self._with(second).ask(prompt, MAX_TOKENS))
            except RequestFailed:
                continue

    def _with(self, extra: dict[str, Any]) -> Server:
        return replace(self.server, extra=self.server.extra | extra)

    def _add(self, name: str, reply: Reply) -> None:
        self.edits.setdefault(name, []).append(reply)

    def times(self, num_words: int) -> tuple[float, float]:
        """Median times to first token at a length, new and again."""
        pairs = self.pairs[num_words]
        return median(p.new.ttft_s for p in pairs), median(p.again.ttft_s for p in pairs)

    @property
    def ratio(self) -> float:
        """Time from the cache by the time of a new prompt, at the longest length."""
        new, again = self.times(self.longest)
        return again / new

    @property
    def shows(self) -> bool:
        """Whether prefill can be seen in the times at all."""
        shortest = min(self.pairs)
        long, short = (
            [pair.new.ttft_s for pair in self.pairs[n]] for n in (self.longest, shortest)
        )
        return shortest < self.longest and min(long) >= GROWS * max(short) + SEEN_S

    @property
    def has_hits(self) -> bool:
        """Whether repeated prompts are seen to be faster."""
        return bool(self.pairs) and self.shows and self.ratio <= FAST

    def _hits(self, others: Sequence[tuple[float, float]]) -> Finding:
        new, again = self.times(self.longest)
        pairs = [(p.new.ttft_s, p.again.ttft_s) for each in self.pairs.values() for p in each]
        pairs += others
        num_slower, num_faster = (
            sum(later > SLOW * first + LEAST_S for first, later in each)
            for each in (pairs, [pair[::-1] for pair in pairs])
        )
        figures: dict[str, Any] = {
            "new_s": round(new, 4), "again_s": round(again, 4), "ratio": round(self.ratio, 3),
            "prompt_tokens": self._num_tokens(), "pairs": len(pairs),
            "slower": num_slower, "faster": num_faster,
        }  # fmt: skip
        told = (
            f"First token of {figures['prompt_tokens']:,} prompt tokens: {again:.2f} s the second "
            f"time, {new:.2f} s the first ({self.ratio:.2f})"
        )
        is_slow = sign_p(num_slower, num_slower + num_faster) < CLEAR
        if self.ratio > SLOW and (is_slow or self._is_slow_where_long()):
            said = (
                f"{num_slower} of {len(pairs)} prompts took longer the second time. {told}: a hit "
                "costs more than computing."
            )
            return Finding("fast", "hits", "red", said, figures)
        if self.has_hits:
            return Finding("fast", "hits", "green", f"{told}.", figures)
        if not self.shows:
            said = f"{told}. Times hardly grow with the prompt, so hits cannot be seen."
            return Finding("fast", "hits", "grey", said, figures)
        is_likely = sign_p(num_faster, num_slower + num_faster) < LIKELY
        is_counted = (_cached([p.again for p in self.pairs[self.longest]]) or 0) > MOSTLY
        if not self._is_enough and (is_likely or is_counted):
            why = f"{num_faster} of {len(pairs)} prompts were faster"
            told += f", but {'usage counts a hit' if is_counted else why}: times vary."
            return Finding("fast", "hits", "grey", told, figures)
        return Finding("fast", "hits", "yellow", f"{told}: no prefix cache, or not hit.", figures)

    @property
    def _is_enough(self) -> bool:
        """Whether times of the longest prompts can contradict anything."""
        return self.shows and len(self.pairs[self.longest]) >= LEAST_PAIRS

    def _is_slow_where_long(self) -> bool:
        """Whether all longer prompts took much longer the second time."""
        long = [pair for n, pairs in self.pairs.items() if 2 * n >= self.longest for pair in pairs]
        return len(long) >= LEAST_LONG and all(
            pair.again.ttft_s > MUCH_SLOWER * pair.new.ttft_s for pair in long
        )

    def _num_tokens(self) -> int:
        counted = [p.new.prompt_tokens for p in self.pairs[self.longest] if p.new.prompt_tokens]
        return counted[0] if counted else round(1.3 * self.longest)

    def _usage(self) -> Finding:
        pairs = self.pairs[self.longest]
        new, again = (_cached([getattr(p, side) for p in pairs]) for side in ("new", "again"))
        if new is None or again is None:
            said = "Usage does not count cached tokens (prompt_tokens_details.cached_tokens)."
            return Finding("fast", "usage", "grey", said)
        figures = {"new": round(new, 3), "again": round(again, 3)}
        told = f"usage counts {again:.0%} of a repeated prompt as cached"
        if again > 1 or (new > MOSTLY and self._grows_with_prompts()):
            said = f"Usage is wrong: it counts {new:.0%} of a new prompt as cached, {again:.0%} of "
            return Finding("fast", "usage", "red", f"{said}a repeated one.", figures)
        ratios = [pair.again.ttft_s / pair.new.ttft_s for pair in pairs]
        if self._is_enough and again > MOSTLY and min(ratios) > FAST and self.ratio < MUCH_SLOWER:
            said = f"U{told[1:]}, but by time nothing is: the count or the cache is wrong."
            return Finding("fast", "usage", "red", said, figures)
        if self._is_enough and again < LITTLE and max(ratios) < MOSTLY:
            said = f"By time a repeated prompt is a hit, but {told}: the count is wrong."
            return Finding("fast", "usage", "red", said, figures)
        how = (
            "as times say" if self._is_enough and self.ratio < MUCH_SLOWER else "times cannot tell"
        )
        return Finding("fast", "usage", "green", f"U{told[1:]}; {how}.", figures)

    def _grows_with_prompts(self) -> bool:
        """Whether usage counts more of longer new prompts; of a template it is always as much."""
        long, short = (
            median(pair.new.cached_tokens or 0 for pair in self.pairs[n])
            for n in (self.longest, min(self.pairs))
        )
        return long > GROWS * short

    def _break_even(self) -> Finding:
        rows = {n: self.times(n) for n in sorted(self.pairs)}
        gains = [n for n, (new, again) in rows.items() if again < FAST * new]
        gains = [n for n in gains if all(m in gains for m in rows if m > n)]
        figures = {str(n): [round(t, 4) for t in times] for n, times in rows.items()}
        if not gains or not self.shows:
            said = "At no probed length is a repeated prompt clearly faster."
            return Finding("fast", "break-even", "grey", said, figures)
        said = f"A repeated prompt is faster at all probed lengths, from {gains[0]} words on."
        if gains[0] > min(rows):
            said = f"A repeated prompt is faster from {gains[0]} words on, not yet at {min(rows)}."
        return Finding("fast", "break-even", "green", said, figures)

    def _kept(self) -> Finding:
        """Which edits keep the prefix; the text for the gain."""
        if not self.edits or not self.has_hits:
            said = "No hit is seen, so edits lose nothing." if self.edits else "No time for edits."
            return Finding("gain", "after an edit", "grey", said)
        new, again = self.times(self.longest)
        shares = {}
        for name, replies in self.edits.items():
            counted = _cached(replies)
            by_time = (new - median(r.ttft_s for r in replies)) / (new - again)
            shares[name] = max(0.0, min(1.0, by_time if counted is None else counted))
        told = "; ".join(f"{name} keeps {share:.0%}" for name, share in shares.items())
        said = f"Of a cached prompt, {told}. What follows an edit is computed again."
        figures = {name: round(share, 3) for name, share in shares.items()}
        is_usual = shares.get(LAST_EDIT, 1.0) >= MOSTLY
        light: Light = "green" if is_usual else "yellow"
        return Finding("gain", "after an edit", light, said, figures)


def _cached(replies: Sequence[Reply]) -> float | None:
    """Median share of prompts that usage counts as cached."""
    shares = [
        reply.cached_tokens / reply.prompt_tokens
        for reply in replies
        if reply.cached_tokens is not None and reply.prompt_tokens
    ]
    return median(shares) if shares else None
