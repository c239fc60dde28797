"""Names of the connector's counters on vLLM's Prometheus endpoint."""

from kvboost.metrics import NAMES

PREFIX = "vllm:kvboost_"

ABSENT = {"exact_hits", "moved_hits", "misses", "warmed_tokens"}
"""Of `kvboost.metrics.NAMES`: what is not counted inside vLLM."""

COUNTED = tuple(name for name in NAMES if name not in ABSENT)
