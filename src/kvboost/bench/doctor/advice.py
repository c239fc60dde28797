"""From what was measured to settings. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvboost.bench.doctor.diagnosis import WORTH_SHARE, is_busy, moved_shares, tier_shares
from kvboost.bench.doctor.facts import Packing, TierSpeed, Visit
from kvboost.config import EXACT_BITS, MIB, Options
from kvboost.tiers.address import shown

CACHE_SHARE = 0.4  # of the memory that is left: quantised K/V takes as much again
CACHE_STEP_BYTES = 256 * MIB
DISK_SHARE = 0.5
PACKING_GAIN = 0.9
DEADLINE_TOKENS = 4096  # that shall come from a tier in time
DEADLINE_MARGIN = 2
UNSIGNED = "; without a cache_secret, whoever can write there can change answers"


@dataclass(frozen=True)
class Setting:
    """An option of the engine, or a variable of the environment, and why it is set so."""

    name: str
    value: str | int | bool
    why: str
    is_variable: bool = False  # of the environment, before Python starts


def settings(visit: Visit, disk_dir: str | None = None, redis: str | None = None) -> list[Setting]:
    """What to set; nothing where the model cannot be reused.

    `disk_dir` and `redis` are the folder and the URL of the measured tiers.
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
    free_bytes = _free_bytes(visit)
    if free_bytes is None:
        return Options().max_cache_bytes
    size_bytes = int(CACHE_SHARE * free_bytes)
    step_bytes = CACHE_STEP_BYTES if size_bytes >= CACHE_STEP_BYTES else MIB
    return max(MIB, size_bytes // step_bytes * step_bytes)


def _free_bytes(visit: Visit) -> int | None:
    """Memory beside the model as it is advised to be."""
    available_bytes = visit.machine.available_bytes
    if available_bytes is None or visit.packing is None or not _is_packed(visit.packing):
        return available_bytes
    return max(0, available_bytes - visit.packing.weight_bytes)


def _reuse(visit: Visit) -> Setting:
    if visit.model.move_refusal:
        return Setting("reuse", "exact", "this model's text cannot be moved")
    tokens, share = moved_shares(visit)[-1]
    quality, budget = visit.quality, Options().quality_budget
    if share >= 1:
        return Setting("reuse", "exact", f"moved text did not pay at {tokens} tokens")
    if share > WORTH_SHARE:
        why = f"moved text takes {share:.0%} of the full time at {tokens} tokens"
        return Setting("reuse", "exact", why)
    if quality is None:
        why = "how much moved text changes answers was not measured; give more --seconds"
        return Setting("reuse", "exact", why)
    if quality.mean_kl > budget:
        return Setting(
            "reuse",
            "exact",
            f"moved text changed an answer by {quality.mean_kl:.3f} nats, more than "
            f"quality_budget={budget}; verify_correctness(prompts, reuse='auto') tells about yours",
        )
    return Setting(
        "reuse",
        "auto",
        f"moved text takes {share:.0%} of the full time at {tokens} tokens; it is approximate: "
        "where answers must be as without reuse, stay with 'exact'",
    )


def _memory(visit: Visit) -> Iterator[Setting]:
    model, size_bytes = visit.model, cache_bytes(visit)
    num_tokens = size_bytes // model.bytes_per_token
    held = f"holds {num_tokens} tokens of text at {model.bytes_per_token / 1024:.1f} KiB each"
    free_bytes = _free_bytes(visit)
    why = "the default; free memory is not known here"
    if free_bytes is not None:
        where = "" if visit.machine.device == "cpu" else " of host memory"
        gib = f"{free_bytes / 2**30:.1f} GiB{where}"
        why = f"{CACHE_SHARE:.0%} of {gib} that are free beside the model"
    yield Setting("max_cache_bytes", size_bytes, f"{why}; {held}")
    more = model.bytes_per_token / model.int8_bytes_per_token
    why = f"8 bits would hold {more:.1f} times as many; answers would then be approximate"
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
        address, why = shown(redis), _against_prefill(visit, shared) + UNSIGNED
        if address != redis:
            why += "; password and options were left out here: add them"
        yield Setting("cache_url", address, why)
    if used:
        yield from _deadline(visit, used)


def _deadline(visit: Visit, used: list[TierSpeed]) -> Iterator[Setting]:
    load_ms = max(tier.load_ms(DEADLINE_TOKENS * visit.model.bytes_per_token) for tier in used)
    default_ms = Options().tier_deadline_ms
    if load_ms > default_ms:
        why = (
            f"{DEADLINE_TOKENS} tokens take {load_ms:.0f} ms to load; after the default "
            f"{default_ms} ms they would count as missing"
        )
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
    if packing is not None and _is_packed(packing):
        why = (
            f"a step of {packing.num_sequences} sequences takes {packing.packed_ms:.0f} instead of "
            f"{packing.plain_ms:.0f} ms; for batches only, and takes the weights' memory twice"
        )
        yield Setting("prepack_weights", value=True, why=why)


def _is_packed(packing: Packing) -> bool:
    return packing.packed_ms <= PACKING_GAIN * packing.plain_ms


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
