"""Names of systems, phases and metrics as the report shows them, with their order and colours."""

from kvboost.bench import systems
from kvboost.bench.names import WORKLOADS

BASELINE = "transformers"
AGAIN = "transformers-again"
POOLED = "all"
MAIN = "kvboost-auto"
OURS = systems.OURS
COMPARED_WITH_ALL = ("kvboost-exact", "kvboost-auto")
SYSTEMS = (*OURS, *(name for name in systems.SYSTEMS if name not in OURS))
PHASES = ("cold", "warm", "moved")
PHASE_MEANINGS = {
    "cold": "nothing of the prompt is cached",
    "warm": "the prompt starts with a cached prefix",
    "moved": "the documents are cached, but from other positions",
}
METRICS = {"ttft": "first token", "total": "whole answer"}
STAGES = ("tokenize", "wait", "lookup", "load", "select", "forward", "decode")

# The page's style sheet gives each family its colour; the accent is ours alone.
_FAMILIES = {
    "transformers": "transformers",
    "kvboost-public": "public",
    "vllm": "vllm",
    "llama": "llama",
}


def workload_place(workload: str) -> tuple[bool, tuple[int, str]]:
    """Return the sorting key of a workload: the pooled one first."""
    return (workload != POOLED, place(workload, WORKLOADS))


def family(system: str) -> str:
    """Return the style class of a system: ``ours``, or the family of a peer."""
    if system in OURS:
        return "ours"
    return next((css for start, css in _FAMILIES.items() if system.startswith(start)), "other")


def place(name: str, order: tuple[str, ...]) -> tuple[int, str]:
    """Return a sorting key: the place in ``order``, names that are not in it last."""
    return (order.index(name) if name in order else len(order), name)


def system_place(system: str) -> tuple[int, str]:
    """Return the sorting key of a system."""
    return place(system, SYSTEMS)
