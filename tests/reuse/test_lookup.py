from hypothesis import given
from hypothesis import strategies as st

from kvboost.core import ContentKey, Entry, Provenance, ReusePlan
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.lookup import LEAST_TOKENS, find
from kvboost.tiers.index import ChunkIndex

SPACE = namespace(b"model", "", None)
SIZE = 8
PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def index_of(*prompts: list[int]) -> ChunkIndex:
    index = ChunkIndex()
    for tokens in prompts:
        chunks = split(tokens, SIZE)
        for chunk, key in zip(chunks, derive(chunks, SPACE), strict=True):
            start = chunk.span.start
            index.add(
                Entry(chunk.tokens, Provenance.EXACT, key.prefix, None, key.parent, start, SPACE)
            )
    return index


def plan_for(tokens: list[int], index: ChunkIndex, granularity: int = 1) -> ReusePlan:
    chunks = split(tokens, SIZE)
    return find(chunks, derive(chunks, SPACE), index, granularity)


def num_common(left: list[int], right: list[int]) -> int:
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


@given(st.lists(PROMPT, min_size=1, max_size=6), PROMPT)
def test_reuse_is_the_longest_common_prefix_to_the_token(
    stored: list[list[int]], tokens: list[int]
) -> None:
    common = max(num_common(tokens, prompt) for prompt in stored)
    expected = min(common, len(tokens) - 1)
    assert plan_for(tokens, index_of(*stored)).num_reused == (
        expected if expected >= LEAST_TOKENS else 0
    )


@given(st.lists(PROMPT, min_size=1, max_size=6), PROMPT, st.sampled_from([1, 8, 16]))
def test_matches_and_live_spans_cover_the_prompt_once(
    stored: list[list[int]], tokens: list[int], granularity: int
) -> None:
    plan = plan_for(tokens, index_of(*stored), granularity)
    spans = sorted([m.span for m in plan.matches] + list(plan.live), key=lambda span: span.start)
    covered = [position for span in spans for position in range(span.start, span.stop)]
    assert covered == list(range(len(tokens)))
    assert plan.num_reused % granularity == 0
    assert plan.live[-1].stop == len(tokens)


def test_a_missing_middle_chunk_ends_the_reuse() -> None:
    tokens = list(range(40))
    index = index_of(tokens)
    chunks = split(tokens, SIZE)
    index.remove(derive(chunks, SPACE)[3].prefix)
    assert plan_for(tokens, index).num_reused == 24


def test_other_tenants_are_not_found() -> None:
    tokens = list(range(40))
    chunks = split(tokens, SIZE)
    other = derive(chunks, namespace(b"model", "other", None))
    assert find(chunks, other, index_of(tokens)).num_reused == 0


def test_approximate_rows_are_no_exact_match_whatever_they_follow() -> None:
    chunks = split(list(range(60)), 2 * LEAST_TOKENS)
    keys, index = derive(chunks, SPACE), ChunkIndex()
    said, name = chunks[0].tokens, ContentKey(bytes(range(32)))
    index.add(Entry(said, Provenance.APPROXIMATE, None, name, keys[0].parent, 0, SPACE))
    assert index.nearest_child(keys[0].parent, said)[1] == 2 * LEAST_TOKENS
    assert find(chunks, keys, index).num_reused == 0
