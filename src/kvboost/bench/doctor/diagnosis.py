"""From what was measured to sentences with numbers. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from kvboost.bench.doctor.facts import NUM_OTHER_TOKENS, TierSpeed, Visit
from kvboost.config import BUSY_SHARE, Options

MUCH_SPREAD = 1.5  # of equal prefills: the slowest against the fastest
FEW_ROUNDS = 3  # below, chance decides
COLD_COST = 1.1  # what reuse may add to the time of new text before it is worth a word
SLOWER_STEP = 1.1  # of Transformers' decode step: worth a report
WORTH_SHARE = 0.8  # of the time without reuse; the engine asks as much of moved text


@dataclass(frozen=True)
class Finding:
    """A sentence."""

    level: Literal["good", "note", "warning"]
    text: str


def findings(visit: Visit) -> list[Finding]:
    """All there is to say, in the order of the visit."""
    if visit.model.refusal:
        return [Finding("warning", f"not certified, no K/V can be reused: {visit.model.refusal}")]
    return [
        *_certification(visit),
        *_trust(visit),
        *_speed(visit),
        *_device(visit),
        _pays("text that begins a prompt as before", exact_shares(visit)),
        *_moved(visit),
        *(finding for tier in visit.tiers for finding in _tier(visit, tier)),
    ]


def break_even(shares: Sequence[tuple[int, float]]) -> int | None:
    """Tokens from which on a share of the full time stays below 1; None if it does not.

    `shares` are (tokens, share), shortest first. Between two lengths the line counts, but a share
    of exactly 1 is no measurement: then the longer one of them does.
    """
    if not shares or shares[-1][1] >= 1:
        return None
    crossing = max((i for i, (_, share) in enumerate(shares) if share >= 1), default=None)
    if crossing is None:
        return shares[0][0]
    (short, above), (long, below) = shares[crossing], shares[crossing + 1]
    if above == 1:
        return long
    return round(short + (long - short) * (above - 1) / (above - below))


def exact_shares(visit: Visit) -> list[tuple[int, float]]:
    """By length: time with the text in memory, as a share of that without reuse."""
    return [(each.num_tokens, each.share(each.exact_ms)) for each in visit.readings]


def moved_shares(visit: Visit) -> list[tuple[int, float]]:
    """By length: time with moved text; 1 where the engine mostly computed it as faster."""
    return [
        (each.num_tokens, each.share(each.moved_ms) if median(each.is_moved) > 0.5 else 1.0)
        for each in visit.readings
    ]


def tier_shares(visit: Visit, tier: TierSpeed) -> list[tuple[int, float]]:
    """By length: time with the text in a tier below memory, loading it included."""
    shares = []
    for each in visit.readings:
        load_ms = tier.load_ms(each.num_tokens * visit.model.bytes_per_token)
        loaded = tuple(exact_ms + load_ms for exact_ms in each.exact_ms)
        shares.append((each.num_tokens, each.share(loaded)))
    return shares


def is_busy(visit: Visit) -> bool:
    """Whether others used the cores before we came."""
    load = visit.machine.load
    return load is not None and load > BUSY_SHARE * visit.machine.num_machine_cores


def is_preliminary(visit: Visit) -> bool:
    """Whether advice rests on times that chance or others may have made."""
    return is_busy(visit) or len(visit.decode_ms) < FEW_ROUNDS


def rate(bytes_per_s: float) -> str:
    """A bandwidth in words."""
    mb = bytes_per_s / 1e6
    return f"{mb / 1e3:.1f} GB/s" if mb >= 1e3 else f"{mb:.0f} MB/s"


def _certification(visit: Visit) -> Iterator[Finding]:
    model = visit.model
    yield Finding(
        "good",
        f"{model.name} in {model.dtype} is certified: computing part of a prompt on stored K/V "
        f"gives the model's own logits (loaded in {model.load_s:.1f} s, certified in "
        f"{model.certify_s:.1f} s)",
    )
    if model.move_refusal:
        yield Finding("note", f"text is reused at its old place only: {model.move_refusal}")


def _trust(visit: Visit) -> Iterator[Finding]:
    machine = visit.machine
    if is_busy(visit):
        yield Finding(
            "warning",
            f"the machine is busy (load {machine.load:.1f} on {machine.num_machine_cores} cores): "
            "the times below mean little, come back when it is quiet",
        )
    worst = max(visit.readings, key=lambda each: each.spread)
    if worst.spread > MUCH_SPREAD:
        yield Finding(
            "warning",
            f"equal prefills of {worst.num_tokens + NUM_OTHER_TOKENS} tokens took from "
            f"{min(worst.full_ms):.0f} to {max(worst.full_ms):.0f} ms: the machine's pace varies",
        )
    num_rounds = len(visit.decode_ms)
    if num_rounds < FEW_ROUNDS:
        text = f"there was time for {num_rounds} of {FEW_ROUNDS} rounds: give more --seconds"
        yield Finding("warning", text)
    if machine.device == "cpu" and machine.num_threads > machine.num_cores:
        yield Finding(
            "warning",
            f"{machine.num_threads} threads compute on {machine.num_cores} cores, "
            "and wait for each other",
        )


def _speed(visit: Visit) -> Iterator[Finding]:
    longest, decode_ms = visit.readings[-1], median(visit.decode_ms)
    yield Finding(
        "note",
        f"prefill: {1e3 / visit.prefill_ms:.0f} tokens/s in a prompt of "
        f"{longest.num_tokens + NUM_OTHER_TOKENS} tokens ({visit.prefill_ms:.2f} ms each); "
        f"decoding: {1e3 / decode_ms:.1f} tokens/s ({decode_ms:.1f} ms each)",
    )
    if (visit.machine.wait_policy or "").upper() == "PASSIVE":
        yield Finding(
            "note",
            f"{visit.machine.num_threads} threads, OMP_WAIT_POLICY=PASSIVE: threads sleep while "
            "they wait. Commands set it on a busy machine; in Python, set it before torch loads",
        )
    cold = min(each.share(each.cold_ms) for each in visit.readings)
    if cold > COLD_COST and len(visit.decode_ms) >= FEW_ROUNDS:
        yield Finding(
            "note",
            f"new text takes at least {cold - 1:.0%} longer with reuse than without, at every "
            "length: reuse costs where nothing comes back",
        )


def _device(visit: Visit) -> Iterator[Finding]:
    seen = visit.device
    if seen is None:
        return
    copies = ", ".join(f"{kind} {rate(speed)}" for kind, speed in seen.copy_bytes_per_s.items())
    versions = ", ".join(f"{name} {number}" for name, number in seen.versions.items())
    yield Finding("note", f"{seen.name} {seen.capability}, {versions}")
    yield Finding("note", f"attention: {seen.attention}")
    yield Finding("note", f"a kernel launch takes {seen.launch_us:.1f} us; copies: {copies}")
    for step in seen.steps:
        is_slower = step.engine_ms > SLOWER_STEP * step.transformers_ms
        yield Finding(
            "warning" if is_slower else "good",
            f"a decode step at batch size {step.num_answers} takes {step.engine_ms:.1f} ms, "
            f"with Transformers alone {step.transformers_ms:.1f} ms",
        )


def _moved(visit: Visit) -> Iterator[Finding]:
    if visit.model.move_refusal:
        return
    yield _pays("moved text", moved_shares(visit))
    quality, budget = visit.quality, Options().quality_budget
    if quality is not None:
        is_within = quality.mean_kl <= budget
        yield Finding(
            "good" if is_within else "note",
            f"an answer on moved text is {quality.mean_kl:.3f} nats from the one after a full "
            f"prefill ({'within' if is_within else 'above'} quality_budget={budget}), "
            f"{quality.top1_ratio:.0%} of its tokens are the same; one built-in prompt, so check "
            "yours with verify_correctness(prompts, reuse='auto')",
        )


def _tier(visit: Visit, tier: TierSpeed) -> Iterator[Finding]:
    if tier.problem:
        yield Finding("warning", f"{tier.name} cannot be used: {tier.problem}")
        return
    if tier.name == "memory":
        return
    yield _pays(f"text from {tier.name}", tier_shares(visit, tier))


def _pays(what: str, shares: Sequence[tuple[int, float]]) -> Finding:
    tokens, share = shares[-1]
    start = break_even(shares)
    if start is None:
        return Finding("note", f"{what} does not pay up to {tokens} tokens")
    since = f"from {start} tokens"
    if all(each < 1 for _, each in shares):
        since += " at the latest, the shortest that was measured"
    end = f"{tokens} tokens take {share:.0%} of the time without reuse"
    return Finding("good" if share <= WORTH_SHARE else "note", f"{what} pays {since}; {end}")
