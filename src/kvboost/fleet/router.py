"""Sends each request to the replica that holds most of its prompt, as far as queues allow it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.serve.request_router import (
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from kvboost.core import ReuseMode
from kvboost.fleet.messages import Forwarded
from kvboost.routing.anchors import find
from kvboost.routing.book import MAX_ANCHORS, Book, Report
from kvboost.routing.choice import Policy, rank
from kvboost.routing.prompts import text_of

Anchors = npt.NDArray[np.uint64]
ANCHORS = "kvboost_anchors"  # attribute of a pending request
MOST_READ_BYTES = 1 << 20  # of a prompt: what comes later goes where its beginning goes


class ReuseRouter(MultiplexMixin, RequestRouter):
    """A request router for Ray Serve, for our replicas and for those of Ray Serve LLM.

    What replicas hold is known from what was sent to them and, where they tell (ours do), from
    their routing stats. It is no FIFO router: those give a replica to whoever waits longest, not to
    the request that it was chosen for.
    """

    def initialize_state(
        self,
        reuse: ReuseMode = "exact",
        least_share: float = 0.1,
        slack: int = 4,
        max_anchors: int = MAX_ANCHORS,
    ) -> None:
        """Take `request_router_kwargs`; `reuse` is what the replicas can reuse.

        `max_anchors` bounds what is remembered, one for about 16 tokens: as many as all replicas
        hold. An anchor takes some 130 bytes, 400 with 1,000 replicas.
        """
        self._reuse = reuse
        self._policy = Policy(least_share, slack)
        self._book = Book(max_anchors)
        self._told: dict[str, Any] = {}  # the last routing stats of each replica

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The preferred replicas one by one, best first, then two random ones."""
        if pending_request is not None and pending_request.metadata.multiplexed_model_id:
            # An adapter of Ray Serve LLM: where it is loaded comes first.
            loaded = self.apply_multiplex_routing(pending_request)
            candidate_replicas = [each for each in candidate_replicas if each.replica_id in loaded]
        if not candidate_replicas:
            return []
        # In random order: of equally good ones the first is preferred.
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        two = shuffled[:2]
        if pending_request is None:
            return [two]
        # Or Ray Serve would ask again without a pause while all queues are full.
        pending_request.routing_context.should_backoff = True
        known = {_name(each.replica_id): each for each in shuffled}
        loads = {
            name: self.replica_queue_len_cache.get(each.replica_id) or 0
            for name, each in known.items()
        }
        shares = self._book.shares(self._anchors(pending_request), in_order=self._reuse == "exact")
        return [*([known[name]] for name in rank(shares, loads, self._policy)), two]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record that a replica will hold a prompt."""
        self._book.sent(self._anchors(pending_request), _name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Read the reports of replicas, and forget those that left.

        Ray Serve calls it when replicas come or go, and whenever their routing stats have changed.
        """
        super().update_replicas(replicas)
        for each in replicas:
            name, told = _name(each.replica_id), each.routing_stats
            if told and told != self._told.get(name):
                self._told[name] = told
                report = Report.from_wire(told)
                if report is not None:
                    self._book.reported(name, report)
        for name in self._book.replicas - {_name(each.replica_id) for each in replicas}:
            self._forget(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica at once, before the controller knows."""
        super().on_replica_actor_died(replica_id)
        self._forget(_name(replica_id))

    def _forget(self, name: str) -> None:
        self._told.pop(name, None)
        self._book.forget(name)

    def _anchors(self, pending_request: PendingRequest) -> Anchors:
        """Those of a request's prompt; found once, however often it is routed."""
        anchors: Anchors | None = getattr(pending_request, ANCHORS, None)
        if anchors is None:
            texts = () if self._reuse == "off" else map(_text, pending_request.args)
            anchors = find(next(filter(None, texts), b"")[:MOST_READ_BYTES])
            setattr(pending_request, ANCHORS, anchors)
        return anchors


def _text(request: object) -> bytes:
    """The prompt in a request of our ingress or of Ray Serve LLM."""
    return text_of(request.asked if isinstance(request, Forwarded) else request)


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.unique_id
    return name
