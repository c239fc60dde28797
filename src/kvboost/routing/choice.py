"""Chooses among replicas, by what they hold and how long their queues are."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """When what a replica holds is worth more than a short queue."""

    least_share: float = 0.1  # of the prompt; who holds less is as good as any other
    slack: int = 4  # requests that a preferred replica may have more than the least busy one


def rank(shares: Mapping[str, float], loads: Mapping[str, int], policy: Policy) -> list[str]:
    """The replicas to prefer, best first; none if nothing speaks for any.

    `shares` come from `Book.shares`; `loads` has all replicas that can be chosen, and their
    requests that run or wait.
    """
    if not loads:
        return []
    busiest = min(loads.values()) + policy.slack
    preferred = [
        replica
        for replica, share in shares.items()
        if share >= policy.least_share and loads.get(replica, busiest + 1) <= busiest
    ]
    # A few percent of a prompt are computed sooner than one more request ahead is answered.
    return sorted(
        preferred, key=lambda replica: (-round(shares[replica], 1), loads[replica], replica)
    )


def two_choices(loads: Mapping[str, int], chance: random.Random) -> str:
    """The replica with the shorter queue of two that are drawn; `loads` is not empty."""
    drawn = chance.sample(list(loads), min(2, len(loads)))
    return min(drawn, key=loads.__getitem__)
