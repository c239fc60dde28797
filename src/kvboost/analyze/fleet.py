"""What a fleet would reuse, and how long requests would wait, by how they are routed.

Every replica serves its requests one after the other: what is in its cache costs nothing, what a
shared tier has costs the loading, the rest is computed. Decoding costs nothing here. What a prompt
leaves in the caches is there from its arrival on; on the same replica nobody can tell, and a shared
tier looks faster by one prefill.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from kvboost.analyze.choices import ROUTINGS
from kvboost.analyze.logs import LoggedRequest
from kvboost.errors import ConfigError
from kvboost.routing.book import MAX_ANCHORS, Book, Report
from kvboost.routing.choice import Policy, rank, two_choices

RING_POINTS = 64  # of each replica, so that their parts of the ring are about equal
GOLDEN = 0x9E3779B97F4A7C15  # spreads names that are small numbers over the ring


@dataclass(frozen=True)
class Setup:
    """A fleet and how it routes; sizes in tokens, caches are least-recently-used."""

    num_replicas: int = 1
    routing: str = "reuse"
    cache_tokens: float = math.inf  # of each replica
    shared_tokens: float = 0.0  # of a tier that all replicas read and write; 0: there is none
    prefill_tokens_per_s: float = 20_000.0
    shared_tokens_per_s: float = 100_000.0  # each replica's share of the network
    hash_tokens: int = 1024  # how much of a prompt `prefix-hash` looks at
    policy: Policy = field(default_factory=Policy)
    num_routers: int = 1  # each with a book of its own; requests go to them by turns
    book_names: int = MAX_ANCHORS  # that a router remembers
    report_names: int = 1 << 14  # at most in one report of a replica
    report_every_s: float = math.inf  # inf: routers know only what they sent themselves


class Served(NamedTuple):
    """What became of one request."""

    replica: str
    local_tokens: float
    shared_tokens: float
    computed_tokens: float
    busy_s: float  # of the replica
    wait_s: float  # from its arrival until its prompt is read


@dataclass(frozen=True)
class FleetResult:
    """Totals over the requests that count."""

    num_requests: int
    prompt_tokens: float
    local_tokens: float
    shared_tokens: float  # loaded from the tier
    computed_tokens: float
    busiest: float  # seconds of work of the busiest replica, relative to the mean
    mean_wait_s: float  # from arrival until the prompt is read: the queue and its own prefill
    p50_wait_s: float
    p95_wait_s: float


def simulate(
    requests: Iterable[LoggedRequest], setup: Setup, *, count_from_s: float = 0.0
) -> FleetResult:
    """Run requests, in order of time, through a fleet; those before `count_from_s` only warm it."""
    fleet = Fleet(setup)
    waits = array("d")
    local = shared = computed = 0.0
    busy_s = dict.fromkeys(fleet.loads, 0.0)
    for request in requests:
        served = fleet.serve(request)
        if request.at_s >= count_from_s:
            local += served.local_tokens
            shared += served.shared_tokens
            computed += served.computed_tokens
            waits.append(served.wait_s)
            busy_s[served.replica] += served.busy_s
    p50, p95 = np.percentile(waits, (50, 95)) if waits else (0.0, 0.0)
    all_busy_s = sum(busy_s.values())
    return FleetResult(
        num_requests=len(waits),
        prompt_tokens=local + shared + computed,
        local_tokens=local,
        shared_tokens=shared,
        computed_tokens=computed,
        busiest=max(busy_s.values()) * len(busy_s) / all_busy_s if all_busy_s else 1.0,
        mean_wait_s=sum(waits) / max(1, len(waits)),
        p50_wait_s=float(p50),
        p95_wait_s=float(p95),
    )


class Fleet:
    """Replicas with their caches and queues, and the routers before them."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        if setup.routing not in ROUTINGS:
            raise ConfigError(f"routing: {setup.routing!r}, expected one of {', '.join(ROUTINGS)}")
        if setup.num_replicas < 1 or setup.num_routers < 1:
            raise ConfigError("a fleet needs at least one replica and one router")
        self.setup = setup
        replicas = [str(number) for number in range(setup.num_replicas)]
        self.loads = dict.fromkeys(replicas, 0)  # requests that wait or run, of replicas that live
        self._caches = {replica: _Cache(setup.cache_tokens) for replica in replicas}
        self._shared = _Cache(setup.shared_tokens) if setup.shared_tokens > 0 else None
        self._free_at_s = dict.fromkeys(replicas, 0.0)
        self._finishes: list[tuple[float, str]] = []
        router = _ROUTERS[setup.routing]
        self._routers = [router(setup, self.loads, seed + n) for n in range(setup.num_routers)]
        self._turn = 0
        self._next_report_s = setup.report_every_s

    def serve(self, request: LoggedRequest) -> Served:
        """Send a request to a replica; times must not fall from call to call."""
        now = request.at_s
        while self._finishes and self._finishes[0][0] <= now:
            self.loads[heapq.heappop(self._finishes)[1]] -= 1
        while self._next_report_s <= now:
            self._report()
            self._next_report_s += self.setup.report_every_s
        replica = self._routers[self._turn].route(request)
        self._turn = (self._turn + 1) % len(self._routers)
        local, shared = self._use_caches(request, self._caches[replica])
        computed = request.num_tokens - local - shared
        busy_s = computed / self.setup.prefill_tokens_per_s
        busy_s += shared / self.setup.shared_tokens_per_s
        finish_s = max(now, self._free_at_s[replica]) + busy_s
        self._free_at_s[replica] = finish_s
        self.loads[replica] += 1
        heapq.heappush(self._finishes, (finish_s, replica))
        return Served(replica, local, shared, computed, busy_s, finish_s - now)

    def lose(self, replicas: Iterable[str]) -> None:
        """Replicas die with their caches. What they had accepted counts as served."""
        lost = set(replicas)
        if lost >= self.loads.keys():
            raise ConfigError("at least one replica must live")
        for replica in lost:
            del self.loads[replica]
            self._caches[replica] = _Cache(self.setup.cache_tokens)
            self._free_at_s[replica] = 0.0
            for router in self._routers:
                router.forget(replica)
        self._finishes = [each for each in self._finishes if each[1] not in lost]
        heapq.heapify(self._finishes)

    def restore(self, replicas: Iterable[str]) -> None:
        """Lost replicas are back, with nothing in their caches."""
        self.loads.update(dict.fromkeys(replicas, 0))

    def _use_caches(self, request: LoggedRequest, cache: _Cache) -> tuple[float, float]:
        """Tokens found in the replica's cache, and of the others those found in the tier."""
        names, sizes = _parts(request)
        is_prefix = request.pieces is None
        local, names, sizes = cache.use(names, sizes, is_prefix=is_prefix)
        if self._shared is None:
            return local, 0.0
        return local, self._shared.use(names, sizes, is_prefix=is_prefix)[0]

    def _report(self) -> None:
        for replica in self.loads:
            held = np.fromiter(self._caches[replica].last_use, np.uint64)
            limit = (1 << 64) - 1
            if len(held) > self.setup.report_names:
                held = np.partition(held, self.setup.report_names - 1)[: self.setup.report_names]
                limit = int(held.max())
            for router in self._routers:
                router.reported(replica, Report(limit, held))


class _Cache:
    """Parts of prompts; the least recently used leave first, and of a prompt the last part."""

    def __init__(self, max_tokens: float) -> None:
        self.last_use: dict[int, int] = {}
        self._max_tokens = max_tokens
        self._num_tokens = 0.0
        self._uses: deque[tuple[int, list[int], list[float]]] = deque()
        self._num_used = 0  # names in them
        self._clock = 0

    def use(
        self, names: list[int], sizes: list[float], *, is_prefix: bool
    ) -> tuple[float, list[int], list[float]]:
        """Tokens that were here, and the parts that were not; now all are."""
        known = self.last_use
        if is_prefix:
            num_held = sum(1 for _ in takewhile(known.__contains__, names))
            held = sum(sizes[:num_held])
            missing, missing_sizes = names[num_held:], sizes[num_held:]
        else:
            pairs = list(zip(names, sizes, strict=True))
            held = sum(size for name, size in pairs if name in known)
            missing = [name for name, _ in pairs if name not in known]
            missing_sizes = [size for name, size in pairs if name not in known]
        new = dict(zip(missing, missing_sizes, strict=True))
        if not known.keys().isdisjoint(new):  # what came after a part that has left
            new = {name: size for name, size in new.items() if name not in known}
        self._num_tokens += sum(new.values())
        self._clock += 1
        known.update(dict.fromkeys(names, self._clock))
        if self._max_tokens < math.inf and names:
            self._note(dict(zip(names, sizes, strict=True)))
            self._make_room()
            if self._num_used > 2 * len(known):
                self._forget_older_uses()
        return held, missing, missing_sizes

    def _note(self, parts: dict[int, float]) -> None:
        self._uses.append((self._clock, list(parts), list(parts.values())))
        self._num_used += len(parts)

    def _make_room(self) -> None:
        while self._uses and self._num_tokens > self._max_tokens:
            clock, names, sizes = self._uses[0]
            if not names:
                self._uses.popleft()
                continue
            name, size = names.pop(), sizes.pop()
            self._num_used -= 1
            if self.last_use.get(name) == clock:
                del self.last_use[name]
                self._num_tokens -= size

    def _forget_older_uses(self) -> None:
        """Keep the last use of each name: traffic that fits into the cache never makes room."""
        uses, self._uses, self._num_used = self._uses, deque(), 0
        for clock, names, sizes in uses:
            pairs = zip(names, sizes, strict=True)
            last = [(name, size) for name, size in pairs if self.last_use.get(name) == clock]
            if last:
                self._uses.append((clock, [name for name, _ in last], [size for _, size in last]))
                self._num_used += len(last)


def _parts(request: LoggedRequest) -> tuple[list[int], list[float]]:
    """Names and sizes of what a cache would keep of a prompt."""
    if request.pieces is not None and request.piece_tokens is not None:
        return request.pieces.tolist(), request.piece_tokens.tolist()
    names = request.blocks.tolist()
    sizes = [float(request.block_tokens)] * len(names)
    if names:
        sizes[-1] = float(request.num_tokens - request.block_tokens * (len(names) - 1))
    return names, sizes


class _Router:
    """Chooses replicas by a rule; the default ignores their reports."""

    def __init__(self, setup: Setup, loads: dict[str, int], seed: int) -> None:
        self.setup, self.loads, self.chance = setup, loads, random.Random(seed)

    def route(self, request: LoggedRequest) -> str:
        """The replica for a request: of two drawn by chance the one with the shorter queue."""
        return two_choices(self.loads, self.chance)

    def reported(self, replica: str, report: Report) -> None:
        """A replica said what it holds."""

    def forget(self, replica: str) -> None:
        """A replica has lost what it held."""


class _ByTurns(_Router):
    def __init__(self, setup: Setup, loads: dict[str, int], seed: int) -> None:
        super().__init__(setup, loads, seed)
        self._order = list(loads)
        self._last = self.chance.randrange(len(loads))

    def route(self, request: LoggedRequest) -> str:
        return self.next_of(self.loads.__contains__)

    def next_of(self, is_wanted: Callable[[str], bool]) -> str:
        """The next one in turn that will do."""
        while True:
            self._last = (self._last + 1) % len(self._order)
            if is_wanted(self._order[self._last]):
                return self._order[self._last]


class _LeastLoaded(_ByTurns):
    def route(self, request: LoggedRequest) -> str:
        loads, least = self.loads, min(self.loads.values())
        return self.next_of(lambda replica: loads.get(replica) == least)


class _PrefixHash(_Router):
    """Consistent hashing of how a prompt begins."""

    def __init__(self, setup: Setup, loads: dict[str, int], seed: int) -> None:
        super().__init__(setup, loads, seed)
        ring = [
            (
                int.from_bytes(
                    blake2b(f"{replica}/{point}".encode(), digest_size=8).digest(), "big"
                ),
                replica,
            )
            for replica in loads
            for point in range(RING_POINTS)
        ]
        ring.sort()
        self._points = [point for point, _ in ring]
        self._owners = [replica for _, replica in ring]

    def route(self, request: LoggedRequest) -> str:
        block = -(-self.setup.hash_tokens // request.block_tokens)
        name = int(request.blocks[:block][-1]) if len(request.blocks) else 0
        place = bisect(self._points, name * GOLDEN % 2**64)
        while self._owners[place % len(self._owners)] not in self.loads:
            place += 1
        return self._owners[place % len(self._owners)]


class _Reuse(_Router):
    """The code that routes real requests."""

    def __init__(self, setup: Setup, loads: dict[str, int], seed: int) -> None:
        super().__init__(setup, loads, seed)
        self._book = Book(setup.book_names)

    def route(self, request: LoggedRequest) -> str:
        names = request.blocks if request.pieces is None else request.pieces
        shares = self._book.shares(names, in_order=request.pieces is None)
        ranked = rank(shares, self.loads, self.setup.policy)
        replica = ranked[0] if ranked else two_choices(self.loads, self.chance)
        self._book.sent(names, replica)
        return replica

    def reported(self, replica: str, report: Report) -> None:
        self._book.reported(replica, report)

    def forget(self, replica: str) -> None:
        self._book.forget(replica)


_ROUTERS = {
    "round-robin": _ByTurns,
    "least-loaded": _LeastLoaded,
    "two-choices": _Router,
    "prefix-hash": _PrefixHash,
    "reuse": _Reuse,
}
