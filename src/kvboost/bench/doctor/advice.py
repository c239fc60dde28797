"""From what was measured to settings. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvboost.bench.doctor.diagnosis import WORTH_SHARE, is_busy, moved_shares, tier_shares
from kvboost.bench.doctor.facts import TierSpeed, Visit
from kvboost.config import EXACT_BITS, MIB, Options

CACHE_SHARE = 0.4  # of the memory that is left: running requests may take as much again
CACHE_STEP_BYTES = 256 * MIB
DISK_SHARE = 0.5
FEW_TOKENS = 32_768  # in memory: a handful of long documents
CHEAP_SHARE = 0.2  # of prefill, for reading 8-bit K/V
PACKING_GAIN = 0.9
DEADLINE_TOKENS = 4096  # that shall come from a tier in time
DEADLINE_MARGIN = 2


@dataclass(frozen=True)
class Setting:
    """An option of the engine, or a variable of the environment, and why it is set so."""

    name: str
    value: str | int | bool
    why: str
    is_variable: bool = False  # of the environment, before Python starts


def settings(visit: Visit, disk_dir: str | None = None, redis: str | None = None) -> list[Setting]:
    """What to set; nothing where the model cannot be reused.

    `disk_dir` and `redis` are what the measured tiers are called in options.
    """
    if visit.model.refusal:
        return []
    return [
        _reuse(visit),
        *_memory(visit),
        *_below(visit, disk_dir, redis),
        *_packing(visit),
        *_environment(visit),
    ]


def cache_bytes(visit: Visit) -> int:
    """Budget of the memory tier that this machine has room for."""
    available = visit.machine.available_bytes
    if available is None:
        return Options().max_cache_bytes
    steps = int(CACHE_SHARE * available) // CACHE_STEP_BYTES
    return max(1, steps) * CACHE_STEP_BYTES


def _reuse(visit: Visit) -> Setting:
    if visit.model.move_refusal:
        return Setting("reuse", "exact", "this model's text cannot be moved")
    tokens, share = min(moved_shares(visit), key=lambda each: each[1])
    budget = Options().quality_budget
    if share >= 1:
        return Setting("reuse", "exact", "moved text did not pay at any length")
    if share > WORTH_SHARE:
        return Setting("reuse", "exact", f"moved text takes {share:.0%} of the full time at best")
    if visit.quality is not None and visit.quality.mean_kl > budget:
        return Setting(
            "reuse",
            "exact",
            f"moved text changed an answer by {visit.quality.mean_kl:.3f} nats, more than "
            f"quality_budget={budget}; verify_correctness(prompts, reuse='auto') tells about yours",
        )
    return Setting(
        "reuse",
        "auto",
        f"moved text takes {share:.0%} of the full time at {tokens} tokens; it is approximate"
        f"{'' if visit.quality else ', how much was not measured'}: where answers must be as "
        "without reuse, stay with 'exact'",
    )


def _memory(visit: Visit) -> Iterator[Setting]:
    model, size_bytes = visit.model, cache_bytes(visit)
    num_tokens = size_bytes // model.bytes_per_token
    held = f"holds {num_tokens} tokens of text at {model.bytes_per_token / 1024:.1f} KiB each"
    available = visit.machine.available_bytes
    why = "the default; free memory is not known here"
    if available is not None:
        why = f"{CACHE_SHARE:.0%} of {available / 2**30:.1f} GiB that are free beside the model"
    yield Setting("max_cache_bytes", size_bytes, f"{why}; {held}")
    is_cheap = model.int8_decode_ms <= CHEAP_SHARE * visit.prefill_ms
    more = model.bytes_per_token / model.int8_bytes_per_token
    if num_tokens < FEW_TOKENS and is_cheap:
        why = f"memory is short; 8 bits hold {more:.1f} times as many tokens, approximately"
        yield Setting("kv_cache_bits", 8, why)
    else:
        why = f"as the model computes it; 8 would hold {more:.1f} times as many, approximately"
        yield Setting("kv_cache_bits", EXACT_BITS, why)


def _below(visit: Visit, disk_dir: str | None, redis: str | None) -> Iterator[Setting]:
    used: list[TierSpeed] = []
    disk, shared = visit.tier("disk"), visit.tier("redis")
    if disk is not None and disk_dir is not None and _is_worth(visit, disk):
        used.append(disk)
        yield Setting("disk_cache_dir", disk_dir, _against_prefill(visit, disk))
        if disk.free_bytes is not None:
            size_bytes = max(MIB, int(DISK_SHARE * disk.free_bytes) // MIB * MIB)
            num_tokens = size_bytes // visit.model.bytes_per_token
            why = f"{DISK_SHARE:.0%} of what is free there; holds {num_tokens} tokens of text"
            yield Setting("max_disk_bytes", size_bytes, why)
    if shared is not None and redis is not None and _is_worth(visit, shared):
        used.append(shared)
        yield Setting("cache_url", redis, _against_prefill(visit, shared))
    if used:
        yield from _deadline(visit, used)


def _deadline(visit: Visit, used: list[TierSpeed]) -> Iterator[Setting]:
    load_ms = max(tier.load_ms(DEADLINE_TOKENS * visit.model.bytes_per_token) for tier in used)
    if load_ms > Options().tier_deadline_ms:
        why = f"{DEADLINE_TOKENS} tokens take {load_ms:.0f} ms to load, then they count as missing"
        yield Setting("tier_deadline_ms", round(DEADLINE_MARGIN * load_ms), why)


def _is_worth(visit: Visit, tier: TierSpeed) -> bool:
    return tier_shares(visit, tier)[-1][1] <= WORTH_SHARE


def _against_prefill(visit: Visit, tier: TierSpeed) -> str:
    load_ms = 1e3 * visit.model.bytes_per_token / tier.get_bytes_per_s
    return (
        f"loading takes {load_ms:.2f} ms a token, computing {visit.prefill_ms:.2f} ms: "
        f"{visit.prefill_ms / load_ms:.0f} times as long"
    )


def _packing(visit: Visit) -> Iterator[Setting]:
    packing = visit.packing
    if packing is not None and packing.packed_ms <= PACKING_GAIN * packing.plain_ms:
        why = (
            f"a step of {packing.num_sequences} sequences takes {packing.packed_ms:.0f} instead of "
            f"{packing.plain_ms:.0f} ms; for batches only, and takes the weights' memory twice"
        )
        yield Setting("prepack_weights", value=True, why=why)


def _environment(visit: Visit) -> Iterator[Setting]:
    machine = visit.machine
    if machine.device != "cpu":
        return
    if is_busy(visit) and (machine.wait_policy or "").upper() != "PASSIVE":
        why = "others use the cores; threads that spin at barriers stall each other"
        yield Setting("OMP_WAIT_POLICY", "PASSIVE", why, is_variable=True)
    if machine.num_threads > machine.num_cores:
        why = f"{machine.num_threads} threads share {machine.num_cores} cores"
        yield Setting("OMP_NUM_THREADS", machine.num_cores, why, is_variable=True)
