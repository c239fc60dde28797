"""Can one client tell by time what another one asked?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from statistics import median

from kvboost.probe.client import REFUSED, BudgetSpent, Reply, RequestFailed, Server
from kvboost.probe.findings import Finding
from kvboost.probe.statistics import Separation, separation
from kvboost.probe.texts import Texts

CLEAR, DOUBTFUL = 0.001, 0.01  # by chance
MOST_ROUNDS = 3  # while it stays doubtful
MAX_TOKENS = 2
KEY_REFUSED = (401, 403)
LEAST_TRIALS = 7  # below that even a perfect separation may be chance
GAP = 0.3  # of a prompt's tokens, by usage


def check(
    victim: Server,
    other: Server,
    texts: Texts,
    failures: list[RequestFailed],
    *,
    num_words: int,
    num_trials: int,
    how: str,
) -> Finding:
    """Have `victim` ask a prompt; time it for `other`, beside one that nobody asked.

    `how` says what separates the two; red if they share what it should keep apart. A request that
    fails ends the trials, and joins `failures` if the server takes what separates the two.
    """
    trials: list[tuple[Reply, Reply]] = []
    is_promised = how != "cache_salt"
    try:
        for trial in _trials(victim, other, texts, num_words):
            trials.append(trial)
            is_doubtful = CLEAR <= _told(trials).p < DOUBTFUL
            if len(trials) >= num_trials * (MOST_ROUNDS if is_doubtful else 1):
                break
    except BudgetSpent:
        pass
    except RequestFailed as error:
        if not trials and error.status in (*REFUSED, *KEY_REFUSED):
            said = f"Requests with {how} are refused, so this could not be checked: {error}"
            return Finding("separate", how, "grey", said)
        failures.append(error)
    if len(trials) < LEAST_TRIALS:
        said = f"{len(trials)} trials with {how} are too few to tell."
        return Finding("separate", how, "grey", said)
    told = _told(trials)
    asked, unasked = zip(*trials, strict=True)
    gap = _counted(asked) - _counted(unasked)
    figures = {
        "auc": round(told.auc, 3), "low": round(told.low, 3), "high": round(told.high, 3),
        "p": told.p, "counted_gap": round(gap, 3), "trials": len(trials),
    }  # fmt: skip
    spread = f"{told.low:.2f} to {told.high:.2f}, {len(trials)} trials"
    by_time = f"AUC {told.auc:.2f} ({spread}; 0.5 is chance)"
    if CLEAR <= told.p < DOUBTFUL and gap < GAP:
        said = f"With {how}, times may tell what another client asked: {by_time}. Run again."
        return Finding("separate", how, "grey", said, figures)
    if told.p >= CLEAR and gap < GAP:
        said = f"With {how}, times do not tell what another client asked: {by_time}."
        return Finding("separate", how, "green", said, figures)
    how_told = "Times tell" if told.p < CLEAR else "Usage tells"
    said = f"{how_told} what another client asked, although {how} differs: {by_time}."
    if is_promised:
        return Finding("separate", how, "red", said, figures)
    said += " This server ignores cache_salt: do not rely on it."
    return Finding("separate", how, "yellow", said, figures)


def _trials(
    victim: Server, other: Server, texts: Texts, num_words: int
) -> Iterator[tuple[Reply, Reply]]:
    """What `other` is answered to a prompt that `victim` asked, and to a new one."""
    for number in count():
        seen, fresh = (texts.document(num_words).prompt for _ in range(2))
        victim.ask(seen, MAX_TOKENS)
        turns = (seen, fresh) if number % 2 else (fresh, seen)
        replies = {prompt: other.ask(prompt, MAX_TOKENS) for prompt in turns}
        yield replies[seen], replies[fresh]


def _told(trials: Sequence[tuple[Reply, Reply]]) -> Separation:
    asked, unasked = zip(*trials, strict=True)
    return separation([r.ttft_s for r in asked], [r.ttft_s for r in unasked])


def _counted(replies: Sequence[Reply]) -> float:
    """Share of prompts that usage counts as cached; 0 where it does not count."""
    return median((reply.cached_tokens or 0) / (reply.prompt_tokens or 1) for reply in replies)
