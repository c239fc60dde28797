import pytest

from kvboost.core import ContentKey, Entry, PrefixKey, Provenance
from kvboost.metrics import NAMES, Metrics


def test_approximate_kv_cannot_be_given_a_prefix_key() -> None:
    key = PrefixKey(b"key")
    with pytest.raises(ValueError, match="approximate"):
        Entry(b"", ContentKey(b""), Provenance.APPROXIMATE, prefix=key, parent=key)
    assert Entry(b"", ContentKey(b""), Provenance.APPROXIMATE, None, None).prefix is None


def test_counters_have_fixed_names() -> None:
    metrics = Metrics()
    metrics.add("misses", 2)
    assert metrics.snapshot() == dict.fromkeys(NAMES, 0) | {"misses": 2}
    with pytest.raises(KeyError):
        metrics.add("mises")
