"""What a running vLLM with the connector does, by its metrics: `kvboost doctor --vllm URL`."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvboost.config import key_header
from kvboost.connectors.vllm.counted import PREFIX
from kvboost.errors import KVBoostError

TIMEOUT_S = 10.0
KEY = "KVBOOST_VLLM_KEY"
KINDS = ("exact", "moved", "repaired")
FEW_REQUESTS = 20  # after which it is odd that nothing was found
FAULTS = {
    "tier_faults": "faults of tiers: prompts were computed without them (vLLM's log names the "
    "tier; `redis-cli ping`, free space)",
    "dropped_writes": "chunks were not written to a tier: too many waited, it refused them or was "
    "down (vLLM's log; the machine or the tier may be too slow for this traffic)",
    "damaged_frames": "frames were damaged, and computed instead: check the disk or who writes to "
    "the shared cache",
    "foreign_frames": "frames belonged to another model or tenant: somebody else writes under "
    "these keys",
}
_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Checkup:
    """What was found: models, counters since vLLM was started, and shares of prompt tokens."""

    url: str
    models: tuple[str, ...]
    is_active: bool
    counters: Mapping[str, int]
    shares: Mapping[str, float]


def check_up(url: str) -> Checkup:
    """Ask a server, whose URL may end in /v1.

    Raises:
        KVBoostError: it cannot be reached, refuses, or is not vLLM.
    """
    url = url.rstrip("/").removesuffix("/v1")
    counts = _counts(_get(f"{url}/metrics"))
    if not any(name.startswith("vllm:") for name in counts):
        raise KVBoostError(f"{url} is not vLLM: /metrics has nothing of it")
    try:
        listed = json.loads(_get(f"{url}/v1/models"))["data"]
        models = tuple(str(each["id"]) for each in listed)
    except (ValueError, LookupError, TypeError) as error:
        raise KVBoostError(f"{url}/v1/models: not a list of models ({error})") from error
    names = [name for name in counts if name.startswith(PREFIX)]
    ours = {name.removeprefix(PREFIX).removesuffix("_total"): counts[name] for name in names}
    theirs = {
        "finished_requests": counts["vllm:request_success_total"],
        "own_hits": counts["vllm:prefix_cache_hits_total"],
        "all_prompt_tokens": counts["vllm:prompt_tokens_total"],
    }
    whole = max(1, theirs["all_prompt_tokens"])
    found = {"vllm": theirs["own_hits"]} | {kind: ours.get(f"{kind}_tokens", 0) for kind in KINDS}
    shares = {kind: round(count / whole, 4) for kind, count in found.items()}
    return Checkup(url, models, "requests" in ours, ours | theirs, shares)


def said(found: Checkup) -> Iterator[tuple[str, str]]:
    """Sentences, each with its level: good, note or warning."""
    counts = Counter(found.counters)
    if not found.is_active:
        yield "warning", "no connector: start vLLM with --kv-transfer-config (docs/guides/vllm.md)"
        return
    num_asked, num_finished = counts["requests"], counts["finished_requests"]
    if not num_asked and num_finished:
        yield (
            "warning",
            f"none of {num_finished:,} requests was looked up: they ask for reuse off, or the "
            "connector refused the model (vLLM's log says why)",
        )
    else:
        yield "good", f"the connector is active: {num_asked:,} requests were looked up"
    yield from _said_of_hits(counts)
    yield from (
        ("warning", f"{counts[name]:,} {text}") for name, text in FAULTS.items() if counts[name]
    )


def _said_of_hits(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """About many requests of which nothing was found."""
    num_found = counts["exact_tokens"] + counts["moved_tokens"]
    if num_found or counts["requests"] < FEW_REQUESTS:
        return
    if counts["own_hits"]:
        yield (
            "note",
            "prompts repeat, but nothing came from the connector: vLLM's own blocks hold what "
            "repeats, or text moves and requests do not allow it (reuse: auto)",
        )
    elif not counts["stored_chunks"]:
        yield "warning", "nothing was stored: prompts are too short, or all saves fail (vLLM's log)"
    else:
        yield "note", "no prompt has begun like an earlier one so far"


def table(found: Checkup) -> list[tuple[str, ...]]:
    """Where prompt tokens came from."""
    counts = Counter(found.counters)
    names = {"vllm": "vLLM's own prefix cache", "exact": "connector, exact"}
    names |= {"moved": "connector, moved", "repaired": "of it computed again"}
    tokens = {"vllm": counts["own_hits"]} | {kind: counts[f"{kind}_tokens"] for kind in KINDS}
    rows = [
        (names[kind], f"{tokens[kind]:,}", f"{share:.1%}") for kind, share in found.shares.items()
    ]
    whole = ("prompt tokens", f"{counts['all_prompt_tokens']:,}", "100.0%")
    return [(", ".join(found.models), "tokens", "share"), whole, *rows]


def _counts(text: str) -> Counter[str]:
    """Counters of Prometheus text, each summed over its labels."""
    counts: Counter[str] = Counter()
    for name, value in _SAMPLE.findall(text):
        if name.endswith("_total"):
            counts[name] += int(float(value))
    return counts


def _get(url: str) -> str:
    headers = key_header(os.environ.get(KEY, ""))
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            text: str = reply.read().decode()
    except urllib.error.HTTPError as error:
        hint = f": set {KEY} to vLLM's --api-key" if error.code == 401 else ""
        raise KVBoostError(f"{url} answered {error.code} {error.reason}{hint}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise KVBoostError(f"no vLLM at {url} ({getattr(error, 'reason', error)})") from error
    return text
