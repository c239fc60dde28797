"""Tenants take turns on a thread."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from kvboost.errors import QueueFull
from kvboost.server.turns import Turns
from waiting import in_a_loop


@in_a_loop
async def test_a_tenant_waits_for_one_piece_of_anothers_work_at_most() -> None:
    done: list[str] = []
    turns, go_on = Turns("test"), threading.Event()
    first = asyncio.create_task(turns.run("a", go_on.wait))
    many = [asyncio.create_task(turns.run("a", partial(done.append, "a"))) for _ in range(20)]
    await asyncio.sleep(0.01)
    few = [asyncio.create_task(turns.run("b", partial(done.append, "b"))) for _ in range(2)]
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(first, *many, *few)
    assert done[:4] == ["a", "b", "a", "b"] and len(done) == 22


@in_a_loop
async def test_a_tenants_queue_has_an_end_and_others_have_their_own() -> None:
    turns, go_on = Turns("test", most_waiting=2), threading.Event()
    tasks = [asyncio.create_task(turns.run("a", go_on.wait)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull, match="2 of your requests"):
        await turns.run("a", go_on.wait)
    tasks.append(asyncio.create_task(turns.run("b", go_on.wait)))
    await asyncio.sleep(0.01)
    go_on.set()
    assert all(await asyncio.gather(*tasks))


@in_a_loop
async def test_who_has_hung_up_waits_no_longer() -> None:
    turns, go_on = Turns("test", most_waiting=2), threading.Event()
    first = asyncio.create_task(turns.run("a", go_on.wait))
    await asyncio.sleep(0.01)
    gone = [asyncio.create_task(turns.run("a", lambda: 1)) for _ in range(2)]
    await asyncio.sleep(0.01)
    for task in gone:
        task.cancel()
    await asyncio.sleep(0.01)
    later = [asyncio.create_task(turns.run("a", lambda: 2)) for _ in range(2)]
    await asyncio.sleep(0.01)
    go_on.set()
    assert await asyncio.gather(first, *later) == [True, 2, 2]


@in_a_loop
async def test_a_turn_that_nobody_wants_is_passed_on() -> None:
    turns, go_on = Turns("test"), threading.Event()
    first = asyncio.create_task(turns.run("a", go_on.wait))
    await asyncio.sleep(0.01)
    tasks = [asyncio.create_task(turns.run("a", lambda: 1)) for _ in range(4)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    go_on.set()
    await first
    tasks[1].cancel()  # perhaps in the moment of its turn
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[2:] == [1, 1]
    assert await turns.run("b", lambda: 2) == 2
