import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.core import (
    ContentKey,
    Entry,
    Match,
    MatchKind,
    Namespace,
    PrefixKey,
    Provenance,
    ReusePlan,
    Span,
)
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


@st.composite
def plans(draw: st.DrawFn) -> ReusePlan:
    """Matches with gaps between some of them."""
    matches, cursor = [], 0
    for number in range(draw(st.integers(0, 5))):
        start = cursor + draw(st.integers(0, 6))
        cursor = start + draw(st.integers(1, 9))
        offset, kind = draw(st.integers(0, 4)), draw(st.sampled_from(MatchKind))
        size = offset + cursor - start + draw(st.integers(0, 3))
        delta = draw(st.integers(-9, 9)) if kind is MatchKind.MOVED else 0
        key = PrefixKey(bytes([number]))
        follows = draw(st.booleans())
        matches.append(Match(Span(start, cursor), key, size, kind, offset, delta, follows))
    return ReusePlan(cursor + draw(st.integers(0, 5)), tuple(matches))


def sources(plan: ReusePlan) -> dict[int, tuple[object, ...]]:
    """Of each position: which token of which chunk is placed there, and how."""
    return {
        position: (m.key, m.offset + position - m.span.start, m.num_tokens, m.kind, m.delta)
        for m in plan.matches
        for position in range(m.span.start, m.span.stop)
    }


@given(plans(), st.integers(0, 90))
def test_a_plan_after_a_position_takes_the_same_for_what_is_left(
    plan: ReusePlan, start: int
) -> None:
    rest = plan.after(start)
    expected = {place: source for place, source in sources(plan).items() if place >= start}
    assert sources(rest) == expected
    assert rest.num_tokens == plan.num_tokens
    assert rest.num_reused == len(expected)
    assert all(len(match.span) > 0 for match in rest.matches)
    seams = {run.span.start for run in plan.runs if run.span.start > start}
    assert {run.span.start for run in rest.runs if run.span.start > start} == seams


@given(plans(), st.integers(0, 50), st.integers(0, 50))
def test_what_is_left_out_twice_is_left_out_once(plan: ReusePlan, one: int, two: int) -> None:
    assert plan.after(0) == plan
    assert plan.after(one).after(two) == plan.after(max(one, two))
    assert plan.before(one).before(two) == plan.before(min(one, two))
    assert plan.after(one).num_reused + plan.before(one).num_reused == plan.num_reused
