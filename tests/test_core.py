import pytest

from kvboost.core import ContentKey, Entry, Namespace, PrefixKey, Provenance
from kvboost.metrics import NAMES, Metrics


def test_approximate_kv_cannot_be_given_a_prefix_key() -> None:
    prefix, content, space = PrefixKey(b"key"), ContentKey(b"key"), Namespace(b"")
    approximate, exact = Provenance.APPROXIMATE, Provenance.EXACT
    for provenance, names in ((approximate, (prefix, None)), (approximate, (prefix, content))):
        with pytest.raises(ValueError, match="approximate"):
            Entry(b"", provenance, *names, parent=None, home=0, space=space)
    for provenance, names in ((approximate, (None, content)), (exact, (prefix, None))):
        assert Entry(b"", provenance, *names, parent=None, home=0, space=space).key == b"key"


def test_counters_have_fixed_names() -> None:
    metrics = Metrics()
    metrics.add("misses", 2)
    assert metrics.snapshot() == dict.fromkeys(NAMES, 0) | {"misses": 2}
    with pytest.raises(KeyError):
        metrics.add("mises")
