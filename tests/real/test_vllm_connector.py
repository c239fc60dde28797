"""The connector inside a real vLLM, started by the tests: `just vllm`.

vLLM wants a Python of its own, which KVBOOST_VLLM_PYTHON names.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.common.material import stream
from benchmarks.serving.inside_vllm import VERDICT, copies
from benchmarks.serving.vllm_server import Reply, VllmServer
from fuse_disk import small_disk
from kvboost import KVBoost
from kvboost.connectors.vllm.events import EventReader
from kvboost.routing import anchors
from kvboost.routing.book import Book
from kvboost.routing.held import Held
from quantised_checkpoints import save_awq, save_gptq
from servers import free_port, redis_server
from waiting import wait_until

pytestmark = pytest.mark.vllm

NUM_NEW = 8
LENGTH = 320  # tokens of a prompt: two chunks and a half
DOCUMENT = 160  # tokens of a text that moves

Start = Callable[..., VllmServer]


@pytest.fixture(scope="module")
def start(smol: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers in fp32, where equal K/V makes equal texts; ends those that are left."""
    python = os.environ.get("KVBOOST_VLLM_PYTHON")
    if not python:
        pytest.fail("set KVBOOST_VLLM_PYTHON to a Python that has vLLM (docs/guides/vllm.md)")
    folder, started = tmp_path_factory.mktemp("vllm"), []

    def start_one(
        connector: dict[str, Any] | None = None,
        *arguments: str,
        name: str = smol,
        ranks: int = 1,
        dtype: str = "float32",
    ) -> VllmServer:
        log = folder / f"{len(started)}.log"
        common = ("--max-model-len", "2048", "--max-num-batched-tokens", "2048", *arguments)
        server = VllmServer(
            python, name, log, connector=connector, dtype=dtype, arguments=common, ranks=ranks
        )
        started.append(server)
        return server

    yield start_one
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def words(smol: str) -> Any:
    return AutoTokenizer.from_pretrained(smol)


@pytest.fixture(scope="module")
def alone(start: Start) -> VllmServer:
    """What vLLM answers without us."""
    return start()


def prompts(words: Any, count: int, first: int = 0, length: int = LENGTH) -> list[list[int]]:
    return [stream(words, length, seed) for seed in range(first, first + count)]


def texts(server: VllmServer, asked: Sequence[Sequence[int]], **how: Any) -> list[str]:
    return [server.complete(tokens, most=NUM_NEW, **how).text for tokens in asked]


def own_text(words: Any, num_tokens: int, seed: int) -> list[int]:
    """Words in an order that no other text has, so that there is one copy to move."""
    shuffled = words.decode(stream(words, 2 * num_tokens, seed)).split()
    random.Random(seed).shuffle(shuffled)
    tokens: list[int] = words(" ".join(shuffled), add_special_tokens=False).input_ids
    return tokens[:num_tokens]


def rag(words: Any, number: int, order: Sequence[int]) -> list[int]:
    """A prompt of documents in some order, and a question."""
    found = [own_text(words, DOCUMENT, 1000 + number * 10 + each) for each in order]
    question = words(f"\n\nQuestion {number}: what is said above?\nAnswer:").input_ids
    return [*(token for document in found for token in document), *question]


def test_greedy_texts_are_those_of_vllm_alone(start: Start, alone: VllmServer, words: Any) -> None:
    """50 of 50, as they are first read and from our memory."""
    asked = prompts(words, 50)
    expected = texts(alone, asked)
    with start({}) as server:
        assert texts(server, asked) == expected
        server.forget()
        warm = [server.complete(tokens, most=NUM_NEW) for tokens in asked]
        assert [each.text for each in warm] == expected
        assert all(each.kvboost["exact_tokens"] == LENGTH - 1 for each in warm)
        assert server.counters()["exact_tokens_total"] == 50 * (LENGTH - 1)


def test_a_store_is_shared_and_outlives_vllm(start: Start, alone: VllmServer, words: Any) -> None:
    asked = prompts(words, 4, first=100)
    expected = texts(alone, asked)
    with redis_server() as shared:
        url = {"cache_url": f"redis://127.0.0.1:{shared.port}", "tier_deadline_ms": 20_000}
        first = start(url)
        assert texts(first, asked[:2]) == expected[:2]
        first.forget()  # and with it everything is computed and on its way
        second = start(url)
        wait_for_keys(shared.port, 2 * 3)
        beside = [second.complete(tokens, most=NUM_NEW) for tokens in asked[:2]]
        assert [each.text for each in beside] == expected[:2]
        assert all(each.kvboost["exact_tokens"] > LENGTH - 64 for each in beside)
        texts(second, asked[2:])
        wait_for_keys(shared.port, 4 * 3)
        second.stop()
        first.kill()
        with start(url) as third:
            after = [third.complete(tokens, most=NUM_NEW) for tokens in asked]
            assert [each.text for each in after] == expected
            assert all(each.kvboost["exact_tokens"] > LENGTH - 64 for each in after)


def test_large_k_v_moves_at_a_share_of_the_speed_of_a_copy() -> None:
    row = copies(os.environ["KVBOOST_VLLM_PYTHON"], dtype="fp32", tokens=1024, rounds=5)
    assert row["load_share"] > 0.6, row
    assert row["save_share"] > 0.45, row  # in place of evicted chunks; into new memory it is 0.34
    # From and to frames; by gathers of single numbers and by vLLM's operation it was 0.04 and 0.17.
    assert row["frames_save_share"] > 0.06, row
    assert row["frames_load_share"] > 0.2, row


def test_fp8_is_reused_exactly_by_another_server(start: Start, words: Any) -> None:
    how = ("--kv-cache-dtype", "fp8")
    asked = prompts(words, 6, first=700)
    with start(None, *how) as plain:
        expected = texts(plain, asked)
    with redis_server() as shared:
        url = {"cache_url": f"redis://127.0.0.1:{shared.port}", "tier_deadline_ms": 20_000}
        with start(url, *how) as first:
            assert texts(first, asked) == expected
            wait_for_keys(shared.port, 6 * 3)
        with start(url, *how) as second:
            warm = [second.complete(tokens, most=NUM_NEW) for tokens in asked]
            assert [each.text for each in warm] == expected
            assert all(each.kvboost["exact_tokens"] > LENGTH - 64 for each in warm)
            moved = second.complete(asked[0], most=NUM_NEW, reuse="auto")
            assert moved.kvboost["provenance"] == "exact"


def test_routers_learn_what_a_vllm_holds(start: Start, words: Any) -> None:
    ports = free_port(), free_port()
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    # vLLM binds to what has a star, and connects to anything else.
    config = {"enable_kv_cache_events": True, "publisher": "zmq"}
    config |= {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
    held = Held(lambda tokens: words.decode(np.frombuffer(tokens, "<u4").tolist()).encode())

    def share(tokens: list[int]) -> float:
        book = Book()
        book.reported("vllm", held.report())
        found = anchors.find(words.decode(tokens).encode())
        return book.shares(found, in_order=False).get("vllm", 0.0)

    before, unread, *others = prompts(words, 40, first=300)
    with start(None, "--kv-events-config", json.dumps(config)) as server:
        server.complete(before, most=1)
        reader = EventReader(held, endpoint, replay)
        for each in others:  # the first event that comes has the reader ask for those before it
            server.complete(each, most=1)
            if share(before) > 0.5:  # whole blocks of 128 tokens alone are told
                break
        reader.close()
    assert share(before) > 0.5
    assert share(unread) < 0.1


def test_transformers_and_vllm_share_a_store(start: Start, smol: str, words: Any) -> None:
    ours, theirs = prompts(words, 2, first=200)
    with redis_server() as shared:
        url = {"cache_url": f"redis://127.0.0.1:{shared.port}", "tier_deadline_ms": 20_000}
        engine = KVBoost.from_pretrained(smol, dtype=torch.float32, **url)
        engine.generate(ours, max_new_tokens=1)
        engine.flush()
        with start(url) as server:
            cold = server.complete(ours, most=1, reuse="off", salt="cold", logprobs=-1)
            crossed = server.complete(ours, most=1, logprobs=-1)
            assert crossed.kvboost["exact_tokens"] == LENGTH - 1
            assert divergence(cold, crossed) < 1e-6
            server.complete(theirs, most=1)
            wait_for_keys(shared.port, 2 * 3)
        fresh = KVBoost.from_pretrained(smol, dtype=torch.float32, **url)
        found = fresh.generate(theirs, max_new_tokens=NUM_NEW)
        plain = fresh.generate(theirs, max_new_tokens=NUM_NEW, reuse="off")
        assert found.cached_tokens == LENGTH - 1
        assert found.output_text == plain.output_text
        for each in (engine, fresh):
            each.close()


def test_faults_of_tiers_fail_no_request(
    start: Start, alone: VllmServer, words: Any, tmp_path: Path
) -> None:
    """Redis killed, frames spoiled, the disk full, vLLM killed: 100 of 100 answers are right."""
    asked = prompts(words, 20, first=300)
    expected = texts(alone, asked)
    with small_disk(tmp_path, 64) as disk, redis_server() as shared:
        options = {
            "cache_url": f"{disk.as_uri()} redis://127.0.0.1:{shared.port}",
            "max_cache_bytes": 40 * 2**20,  # two or three prompts
            "max_disk_bytes": 128 * 2**20,  # twice what there is room for
            "tier_deadline_ms": 300,
        }
        server = start(options)
        assert texts(server, asked) == expected
        spoil(shared.port)
        server.forget()
        assert texts(server, asked) == expected
        shared.kill()
        server.forget()
        assert texts(server, asked) == expected
        server.kill()
        shared.start()
        server = start(options)
        assert texts(server, asked) == expected
        server.forget()
        assert texts(server, asked) == expected
        counted = server.counters()
        assert counted["exact_tokens_total"] > 0
        server.stop()


def test_what_cannot_be_loaded_is_computed(
    start: Start, alone: VllmServer, words: Any, tmp_path: Path
) -> None:
    """The scheduler was told of K/V on a disk that turns out to be damaged."""
    asked = prompts(words, 6, first=400)
    expected = texts(alone, asked)
    with start({"disk_cache_dir": str(tmp_path), "max_cache_bytes": 16 * 2**20}) as server:
        assert texts(server, asked) == expected
        server.forget()
        assert texts(server, asked[:2]) == expected[:2]
        assert server.counters()["exact_tokens_total"] > 0
        spoil_files(tmp_path)
        server.forget()
        assert texts(server, asked) == expected
        assert "Recovered from KV load failure" in server.log.read_text()


def test_nothing_approximate_is_served_to_plain_requests(
    start: Start, alone: VllmServer, words: Any
) -> None:
    """200 times a request that may reuse moved text, then the same prompt without."""
    cases = [(number, order) for number in range(25) for order in ((0, 1), (1, 0))]
    asked = [rag(words, number, order) for number, order in cases]
    expected = dict(zip(map(tuple, asked), texts(alone, asked), strict=True))
    with start({"quality_budget": 100.0, "audit_ratio": 1.0}) as server:
        approximate = 0
        for turn in range(4):
            for tokens in asked if turn % 2 == 0 else reversed(asked):
                moved = server.complete(tokens, most=NUM_NEW, reuse="auto")
                approximate += moved.kvboost["provenance"] == "approximate"
                plain = server.complete(tokens, most=NUM_NEW)
                assert plain.kvboost["provenance"] == "exact"
                assert plain.text == expected[tuple(tokens)]
            server.forget()
        assert approximate >= 25, "nothing moved was reused, so this shows nothing"


def test_a_follow_up_question_on_moved_text_is_exact(
    start: Start, alone: VllmServer, words: Any
) -> None:
    asked = [rag(words, 90, order) for order in ((0, 1, 2), (2, 0, 1))]
    with start({"quality_budget": 100.0, "audit_ratio": 0.0}) as server:
        server.complete(asked[0])
        server.forget()  # once all of it is saved
        first = server.complete(asked[1], most=NUM_NEW, reuse="auto")
        assert first.kvboost["provenance"] == "approximate"
        server.forget()  # waits until idle time was used
        assert server.counters()["promoted_tokens_total"] > 0
        follow_up = [*asked[1], *words(f"{first.text}\n\nQuestion: and below?\nAnswer:").input_ids]
        second = server.complete(follow_up, most=NUM_NEW, reuse="auto")
        assert second.kvboost["provenance"] == "exact"
        assert second.kvboost["exact_tokens"] >= len(asked[1])
        assert second.text == alone.complete(follow_up, most=NUM_NEW).text


def test_crowded_blocks_change_no_text(start: Start, alone: VllmServer, words: Any) -> None:
    """Many at once with few blocks: requests are preempted while they load and save."""
    asked = [rag(words, number, (0, 1, 2)) for number in range(50, 58)]
    turned = [rag(words, number, (2, 0, 1)) for number in range(50, 58)]
    everything = [*asked, *turned] * 2
    expected = texts(alone, everything)
    with start({}, "--num-gpu-blocks-override", "24", "--max-num-seqs", "8") as server:

        def ask(number: int) -> Reply:
            reuse = "auto" if number % 3 == 0 else None
            return server.complete(everything[number], most=NUM_NEW, reuse=reuse)

        with ThreadPoolExecutor(12) as callers:
            replies = list(callers.map(ask, range(len(everything))))
        exact = [n for n, reply in enumerate(replies) if reply.kvboost["provenance"] == "exact"]
        assert len(exact) >= len(everything) // 2
        assert [replies[n].text for n in exact] == [expected[n] for n in exact]
        server.forget()  # all blocks came back
        assert "exact text, and moved text" in server.log.read_text()  # certified with 8 sequences


def test_two_ranks_answer_like_one(start: Start, words: Any, tmp_path: Path) -> None:
    """Exact and moved text; and when one of them has lost all its frames."""
    save_tiny(words, str(tmp_path / "tiny"))
    on_two_ranks(start, str(tmp_path / "tiny"), words, 6, tmp_path / "disk")


@pytest.mark.long
def test_two_ranks_of_a_trained_model_answer_fifty_prompts_like_one(
    start: Start, coder: str, tmp_path: Path
) -> None:
    num_compared = on_two_ranks(
        start, coder, AutoTokenizer.from_pretrained(coder), 50, tmp_path / "disk"
    )
    assert num_compared >= 40  # of the others, the cost model moved more here or there


def on_two_ranks(start: Start, name: str, words: Any, count: int, disk: Path) -> int:
    """Compare texts of one rank and of two; how many on moved text could be compared."""
    plain = prompts(words, count)
    read = [rag(words, number, (0, 1)) for number in range(count)]
    turned = [rag(words, number, (1, 0)) for number in range(count)]
    options = {"reuse": "exact", "quality_budget": 100.0, "tier_deadline_ms": 20_000}

    def moved(server: VllmServer) -> list[tuple[int, str]]:
        replies = [server.complete(each, most=NUM_NEW, reuse="auto") for each in turned]
        return [(each.kvboost["moved_tokens"], each.text) for each in replies]

    with start(options, name=name) as one:
        expected = texts(one, plain)
        texts(one, read)
        expected_moved = moved(one)
        expected_turned = texts(one, turned)
    # Memory has room for a part of the prompts, the others come from disk.
    memory_bytes = 150 * count * kv_bytes(name)
    small = {**options, "disk_cache_dir": str(disk), "max_cache_bytes": memory_bytes}
    with start(small, name=name, ranks=2) as two:
        assert texts(two, plain) == expected
        two.forget()
        assert texts(two, plain) == expected
        assert two.counters()["exact_tokens_total"] == count * (LENGTH - 1)
        texts(two, read)
        found = moved(two)
        # As much is not always moved: whether it pays is measured.
        pairs = list(zip(found, expected_turned, expected_moved, strict=True))
        others = [
            (number, num_moved)
            for number, ((num_moved, text), full, (as_much, same)) in enumerate(pairs)
            if num_moved in (0, as_much) and text != (same if num_moved else full)
        ]
        assert others == []
        two.forget()
        assert {each.name for each in disk.iterdir()} == {"rank-0-0", "rank-0-1"}
        spoil_files(disk / "rank-0-1", every=2**13)
        texts(two, turned, reuse="auto")  # some of it may still be in memory
        assert texts(two, plain) == expected
        assert two.counters()["damaged_frames_total"] > 0
    assert any(num_moved for num_moved, _ in found)
    return sum(num_moved == as_much > 0 for (num_moved, _), _, (as_much, _) in pairs)


def kv_bytes(name: str) -> int:
    """K/V of a token in float32."""
    config = AutoConfig.from_pretrained(name)
    head_dim = config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * 4)


@pytest.mark.parametrize("save", [save_awq, save_gptq])
def test_quantised_checkpoints_are_reused_exactly_and_their_moved_text_is_near(
    save: Callable[[Any, Path, int], Any], start: Start, smol: str, words: Any, tmp_path: Path
) -> None:
    """These run in 16 bits, where texts are equal if prompts are split alike: at whole blocks."""
    words.save_pretrained(tmp_path)
    save(AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32), tmp_path, 64)
    asked = prompts(words, 50, length=2 * 128 + 1)
    options = {"audit_ratio": 1.0, "quality_budget": 100.0}
    num_moved = 0  # where that pays, which is measured
    with start(options, name=str(tmp_path), dtype="bfloat16") as server:
        texts(server, asked)
        expected = texts(server, asked, reuse="off")  # from vLLM's own prefix cache
        server.forget()
        warm = [server.complete(tokens, most=NUM_NEW) for tokens in asked]
        assert [each.text for each in warm] == expected
        assert all(each.kvboost["exact_tokens"] == 2 * 128 for each in warm)
        for number in range(12):
            server.complete(rag(words, number, (0, 1)))
            server.forget()  # once it is saved
            moved = server.complete(rag(words, number, (1, 0)), most=NUM_NEW, reuse="auto")
            num_moved += moved.kvboost["provenance"] == "approximate"
            server.forget()  # once it is audited
        verdicts = [float(kl) for kl, _ in VERDICT.findall(server.log.read_text())]
    assert len(verdicts) == num_moved >= 4
    # On words without sense; 0.03 without quantisation in fp32, 0.10 and 0.11 here.
    assert sum(verdicts) / num_moved < 0.3


def test_a_wrong_option_ends_the_start_with_a_hint(start: Start) -> None:
    with pytest.raises(RuntimeError, match="did you mean 'cache_url'"):
        start({"cache_urls": "redis://127.0.0.1:1"})


def divergence(cold: Reply, other: Reply) -> float:
    """KL of the first token's distribution, in nats, over the whole vocabulary."""
    (p,), (q,) = cold.logprobs, other.logprobs
    ids = sorted(p)
    left, right = (torch.tensor([each[i] for i in ids], dtype=torch.float64) for each in (p, q))
    return float((left.exp() * (left - right)).sum())


def wait_for_keys(port: int, count: int) -> None:
    """Until so many frames are in Redis: they are written behind answers."""
    client = redis.Redis(port=port)
    keys = lambda: client.scan_iter(count=1000)  # noqa: E731
    wait_until(lambda: sum(client.strlen(key) > 4096 for key in keys()) >= count)


def spoil(port: int) -> None:
    """Change a byte in the middle of everything that Redis holds."""
    client = redis.Redis(port=port)
    keys = list(client.scan_iter(count=1000))
    assert keys
    for key in keys:
        length = client.strlen(key)
        client.setrange(key, length // 2, b"\x5a")


def spoil_files(folder: Path, every: int = 2**20) -> None:
    """Change some bytes all over the files of a disk tier."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > every:
            with path.open("r+b") as file:
                for place in range(every // 16, path.stat().st_size, every):
                    file.seek(place)
                    file.write(b"\x5a" * 64)


def save_tiny(words: Any, folder: str) -> None:
    """A model of random weights whose heads can be shared out to two ranks; starts in no time."""
    words.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # attention matters
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
