"""Builds the application for Ray Serve: `serve run kvboost.fleet.app:app model=FOLDER replicas=2`.

Arguments are the options of `kvboost serve`, by their names, and those of `FleetOptions`. Where
to listen is Ray Serve's to know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from kvboost.config import Options, checked, option, unknown_option
from kvboost.errors import ConfigError
from kvboost.fleet.ingress import GRACE_S, Ingress
from kvboost.fleet.replica import EngineReplica
from kvboost.server.options import ServerOptions, read_options

ROUTINGS = ("reuse", "default")
NOT_HERE = ("host", "port", "workers")  # of the server: Ray Serve listens and starts processes
MOST_AT_FRONT = 1_000  # requests that the ingress holds open, with their bodies
# Between two reports of what a replica holds. Ray's controller sends them all to every router
# whenever one changed, and shorter periods bring nothing (docs/concepts/scale.md).
STATS_PERIOD_S = 5.0
HEALTH_PERIOD_S = 2.0  # a replica that died is missed after as long at most


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """What a fleet takes besides the options of the server and the engine."""

    replicas: int = option(1, "engines, each in its own process", low=1)
    autoscale: str | None = option(
        None, "MIN:MAX replicas, as many as the requests need; instead of `replicas`"
    )
    routing: str = option("reuse", "'reuse': to who holds the prompt; 'default': Ray Serve's own")
    num_cpus: float = option(1.0, "cores and threads of a replica", low=0.0)
    num_gpus: float = option(0.0, "GPUs of a replica", low=0.0)

    def __post_init__(self) -> None:
        for each in fields(self):
            checked(each, getattr(self, each.name))
        if self.routing not in ROUTINGS:
            raise ConfigError(f"routing={self.routing!r}: expected one of {', '.join(ROUTINGS)}")
        low, high = self.scale
        if not 1 <= low <= high:
            raise ConfigError(f"autoscale={self.autoscale!r}: expected a text MIN:MAX, such as 1:4")

    @property
    def scale(self) -> tuple[int, int]:
        """The least and the most replicas; zeros if what was written is no such pair."""
        if self.autoscale is None:
            return self.replicas, self.replicas
        low, _, high = str(self.autoscale).partition(":")
        return (int(low), int(high)) if low.isdecimal() and high.isdecimal() else (0, 0)


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application; what is not given is taken from KVBOOST_* variables, as everywhere.

    Raises:
        ConfigError: an unknown name or a wrong value.
    """
    fleet, options, engine_options = read_arguments(arguments)
    replicas = serve.deployment(EngineReplica).options(
        **_scaling(fleet, engine_options),
        max_ongoing_requests=engine_options.max_batch_size + engine_options.max_queue_size,
        graceful_shutdown_timeout_s=options.drain_s + GRACE_S,
        health_check_period_s=HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": fleet.num_cpus, "num_gpus": fleet.num_gpus},
        request_router_config=_routing(fleet, engine_options),
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        max_ongoing_requests=MOST_AT_FRONT,
        graceful_shutdown_timeout_s=options.drain_s + 2 * GRACE_S,
        health_check_period_s=HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replicas.bind(options, engine_options), options)


def read_arguments(arguments: Mapping[str, Any]) -> tuple[FleetOptions, ServerOptions, Options]:
    """The options of the fleet, of its servers and of their engines.

    Raises:
        ConfigError: an unknown name or a wrong value.
    """
    own = {each.name for each in fields(FleetOptions)}
    known = own | {each.name for kind in (ServerOptions, Options) for each in fields(kind)}
    for name in arguments:
        if name in NOT_HERE:
            raise ConfigError(f"{name}: is Ray Serve's to know, in http_options of its config")
        if name not in known | {"config"}:
            raise unknown_option(name, sorted(known - {*NOT_HERE}))
    kinds = {"replicas": int, "num_cpus": float, "num_gpus": float}
    values = {
        name: _number(name, value, kinds[name]) if name in kinds else value
        for name, value in arguments.items()
        if name in own
    }
    rest = {name: value for name, value in arguments.items() if name not in own}
    return FleetOptions(**values), *read_options(rest, os.environ)


def _number(name: str, written: Any, kind: type) -> Any:
    try:
        return kind(written)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={written!r}: expected a number") from None


def _scaling(fleet: FleetOptions, engine_options: Options) -> dict[str, Any]:
    low, high = fleet.scale
    if fleet.autoscale is None:
        return {"num_replicas": low}
    scaling = AutoscalingConfig(
        min_replicas=low,
        max_replicas=high,
        target_ongoing_requests=engine_options.max_batch_size,
    )
    return {"autoscaling_config": scaling}


def _routing(fleet: FleetOptions, engine_options: Options) -> RequestRouterConfig:
    if fleet.routing == "default":
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class="kvboost.fleet.router:ReuseRouter",
        request_router_kwargs={"reuse": engine_options.reuse},
        request_routing_stats_period_s=STATS_PERIOD_S,
    )
