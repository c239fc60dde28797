"""Chooses among replicas, by what they hold and how long their queues are."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How much held text is worth, against a shorter queue."""

    least_share: float = 0.1  # of the prompt; a replica that holds less is as good as any other
    slack: int = 4  # requests more than the least busy one has, that a whole prompt is worth


def rank(shares: Mapping[str, float], loads: Mapping[str, int], policy: Policy) -> list[str]:
    """The replicas to prefer, best first; none if nothing speaks for any.

    `shares` come from `Book.shares`; `loads` has all replicas that can be chosen, and their
    requests that run or wait. Half a prompt is worth half the wait, or a beginning that all
    prompts have would bring all of them to the replica that saw it first.
    """
    least = min(loads.values(), default=0)
    gains = {
        replica: policy.slack * shares[replica] - (load - least)
        for replica, load in loads.items()
        if shares.get(replica, 0.0) >= policy.least_share
    }
    preferred = [replica for replica, gain in gains.items() if gain >= 0]
    return sorted(preferred, key=gains.__getitem__, reverse=True)


def two_choices(loads: Mapping[str, int], chance: random.Random) -> str:
    """The replica with the shorter queue of two that are drawn; `loads` is not empty."""
    drawn = chance.sample(list(loads), min(2, len(loads)))
    return min(drawn, key=loads.__getitem__)
