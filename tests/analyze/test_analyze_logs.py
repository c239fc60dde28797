"""Logs of requests: their formats, their names, and what is wrong with their lines."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvboost.analyze.curve import follow
from kvboost.analyze.logs import LoggedRequest, read
from kvboost.errors import ConfigError


def log_of(folder: Path, entries: Iterable[Any]) -> Path:
    """A file with a line for each entry; strings are lines as they are."""
    lines = (each if isinstance(each, str) else json.dumps(each) for each in entries)
    path = folder / "log.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def traced(*ids: int, timestamp: float = 0, rest: int = 512) -> dict[str, Any]:
    length = 512 * (len(ids) - 1) + rest
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": 9,
        "hash_ids": list(ids),
    }


def prose(seed: int, num_words: int = 300) -> str:
    chance = random.Random(seed)
    return " ".join("".join(chance.choices("abcdefghij", k=6)) for _ in range(num_words))


def shared(first: LoggedRequest, second: LoggedRequest) -> int:
    """Leading blocks in common."""
    pairs = zip(first.blocks.tolist(), second.blocks.tolist(), strict=False)
    equal = [one == other for one, other in pairs]
    return [*equal, False].index(False)


def reused(request: LoggedRequest, before: LoggedRequest) -> float:
    """Tokens in pieces that another prompt has too."""
    assert request.pieces is not None
    assert request.piece_tokens is not None
    assert before.pieces is not None
    return float(request.piece_tokens[np.isin(request.pieces, before.pieces)].sum())


def test_a_hash_trace(tmp_path: Path) -> None:
    path = log_of(tmp_path, [traced(0, 1, 2, timestamp=500, rest=10), traced(0, 9, timestamp=2500)])
    first, second = read(path)
    assert (first.at_s, second.at_s) == (0, 2)
    assert (first.num_tokens, first.block_tokens, len(first.blocks)) == (1034, 512, 3)
    assert shared(first, second) == 1
    assert first.pieces is None


def test_lines_without_a_time_are_of_the_time_before_them(tmp_path: Path) -> None:
    made = 1_700_000_000
    texts = [{"prompt": prose(n)} | ({"created": made + n} if n % 2 else {}) for n in range(6)]
    path = log_of(tmp_path, texts)
    assert [each.at_s for each in read(path)] == [0, 0, 0, 2, 2, 4]
    first, *others = [traced(n, timestamp=1e12 + n) for n in range(4)]
    del first["timestamp"]
    path = log_of(tmp_path, [first, *others])
    assert [each.at_s for each in read(path)] == pytest.approx([0, 0, 0.001, 0.002], abs=1e-6)


def test_any_unit_of_time_is_a_number(tmp_path: Path) -> None:
    for now in (1.7e12, 1.7e15, 1.7e18):
        path = log_of(tmp_path, [traced(n, timestamp=int(now) + n) for n in range(3)])
        assert len(list(read(path))) == 3


def test_times_never_fall(tmp_path: Path) -> None:
    path = log_of(tmp_path, [traced(1, timestamp=ms) for ms in (1000, 3000, 2000, 4000)])
    assert [request.at_s for request in read(path)] == [0, 2, 2, 3]


def test_many_lines_at_once_are_as_one_by_one(tmp_path: Path) -> None:
    """The first line of a log is always read by itself; a blank line makes all others so."""
    chance = random.Random(1)
    entries = [
        traced(*range(chance.randint(1, 9)), timestamp=chance.randint(0, 99), rest=7)
        for _ in range(3000)
    ]
    at_once = list(read(log_of(tmp_path, entries), block_tokens=1024))
    one_by_one = list(
        read(log_of(tmp_path, [x for e in entries for x in (e, "")]), block_tokens=1024)
    )
    assert len(at_once) == len(one_by_one) == 3000
    for quick, slow in zip(at_once, one_by_one, strict=True):
        assert (quick.num_tokens, quick.block_tokens) == (slow.num_tokens, slow.block_tokens)
        assert quick.at_s == pytest.approx(slow.at_s)
        assert quick.blocks.tolist() == slow.blocks.tolist()


def test_the_next_turn_begins_with_the_one_before(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": prose(1)}, {"role": "user", "content": prose(2)}]
    more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": prose(3)}]
    path = log_of(
        tmp_path,
        [
            {"messages": messages, "created": 100},
            {"body": {"messages": messages + more}, "created": 103},
        ],
    )
    first, second = read(path, block_tokens=16)
    assert second.at_s == 3
    assert shared(first, second) == len(first.blocks) - 1  # its last has room left
    assert reused(second, first) == pytest.approx(first.num_tokens, abs=2)
    assert first.piece_tokens is not None
    assert first.piece_tokens.sum() == pytest.approx(first.num_tokens)


def test_moved_text_is_found_by_its_content_only(tmp_path: Path) -> None:
    document = prose(5, 1000)
    path = log_of(tmp_path, [{"prompt": prose(6, 50) + document}, {"prompt": document + "Why?"}])
    first, second = read(path)
    assert shared(first, second) == 0
    assert 0.95 * second.num_tokens < reused(second, first) < second.num_tokens
    findings = follow(read(path))
    assert findings.content is not None
    assert findings.prefix[128].share().value == 0
    assert 0.45 < findings.content.share().value < 0.5


def test_tokens_are_told_from_bytes(tmp_path: Path) -> None:
    path = log_of(tmp_path, [{"prompt": "x" * 1000}, {"prompt": ""}])
    assert [request.num_tokens for request in read(path)] == [250, 0]
    (longer, _) = read(path, bytes_per_token=3.0, block_tokens=100)
    assert (longer.num_tokens, len(longer.blocks)) == (334, 4)


def test_packed_files(tmp_path: Path) -> None:
    path = log_of(tmp_path, [traced(1), traced(2)])
    packed = tmp_path / "log.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(list(read(packed))) == 2
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(ConfigError, match="damaged gzip file"):
        list(read(packed))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"hash_ids": [1], "input_length": 5', "not JSON: Expecting ',' delimiter at column 36"),
        ("[1, 2]", "expected an object with hash_ids, messages or prompt"),
        ('{"text": "hello"}', "expected hash_ids, messages or prompt"),
        ('{"hash_ids": [1], "input_length": 513}', "1 hash_ids for input_length=513: expected one"),
        ('{"hash_ids": [], "input_length": -5}', "input_length=-5: expected a number of tokens"),
        ('{"hash_ids": [1]}', "input_length=None: expected a number of tokens"),
        ('{"hash_ids": ["1"], "input_length": 5}', "hash_ids: expected a list of whole numbers"),
        ('{"hash_ids": [-1], "input_length": 5}', "hash_ids: expected numbers from 0 to 2^64 - 1"),
        ('{"prompt": "x", "timestamp": "noon"}', "timestamp='noon': expected a number"),
        (f'{{"prompt": "x", "created": 1{"0" * 400}}}', "created=1000"),
        ("[" * 100_000, "maximum recursion depth"),
    ],
)
def test_broken_lines_are_told_with_their_number(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(read(log_of(tmp_path, ["", line, traced(1)])))
    assert str(caught.value).startswith(f"line 2: {reason}")
    told: list[tuple[int, str]] = []
    log = log_of(tmp_path, [traced(1), traced(2), line, traced(3)])
    requests = list(read(log, on_broken=lambda *what: told.append(what)))
    assert len(requests) == 3
    assert [number for number, _ in told] == [3]


def test_a_negative_length_is_refused_among_many_lines(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    bad = {"timestamp": 0, "input_length": -5, "hash_ids": []}
    log = log_of(tmp_path, [*[traced(1)] * 9000, bad, traced(2)])
    requests = list(read(log, on_broken=lambda *what: told.append(what)))
    assert len(requests) == 9001
    assert told == [(9001, "input_length=-5: expected a number of tokens")]


def test_too_many_broken_lines_end_it(tmp_path: Path) -> None:
    few = [traced(number) if number % 150 else "{" for number in range(1, 1000)]
    assert len(list(read(log_of(tmp_path, few)))) == 999 - 6
    many = [traced(number) if number % 50 else "{" for number in range(1, 1000)]
    with pytest.raises(ConfigError, match=r"line 200: not JSON: .*; 4 lines are broken, more"):
        list(read(log_of(tmp_path, many)))


def test_a_log_has_one_format(tmp_path: Path) -> None:
    told: list[str] = []
    log = log_of(tmp_path, [traced(1), {"prompt": "x"}])
    list(read(log, on_broken=lambda _, reason: told.append(reason)))
    assert told == ["the first line was one of a hash trace, this one is not"]


def test_a_trace_cannot_tell_smaller_blocks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a hash trace has blocks of 512 tokens: block_tokens"):
        list(read(log_of(tmp_path, [traced(1)]), block_tokens=64))
