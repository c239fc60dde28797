"""The engine's counters."""

from __future__ import annotations

import pytest

from kvboost.metrics import MOST_TENANTS, OTHER_TENANTS, Metrics


def test_names_are_fixed() -> None:
    with pytest.raises(KeyError):
        Metrics().add("hits")


def test_what_is_counted_for_a_tenant_is_in_the_whole() -> None:
    metrics = Metrics()
    metrics.add("misses", 2, tenant="a")
    metrics.add("misses", 3, tenant="")
    metrics.add("misses")
    assert metrics.snapshot()["misses"] == 6
    assert {name: counts["misses"] for name, counts in metrics.tenants().items()} == {"a": 2, "": 3}


def test_tenants_beyond_the_limit_are_counted_together() -> None:
    metrics = Metrics()
    for number in range(MOST_TENANTS + 10):
        metrics.add("requests", tenant=f"tenant {number}")
    metrics.add("requests", tenant="tenant 0")
    tenants = metrics.tenants()
    assert len(tenants) == MOST_TENANTS + 1
    assert tenants["tenant 0"]["requests"] == 2
    assert tenants[OTHER_TENANTS]["requests"] == 10
