"""What a request may reuse."""

from __future__ import annotations

from kvboost.build import Parts
from kvboost.engine.prefill import Terms
from kvboost.engine.request import Request
from kvboost.models.hf import HFModel


def why_not(request: Request, model: HFModel, num_tokens: int) -> str:
    """Why this request must not touch the store, or an empty string."""
    if model.refusal:
        return model.refusal
    if request.reuse == "off":
        return "reuse is off"
    if model.is_alone(num_tokens):
        return (
            f"the rotary embedding changes beyond {model.position_limit} positions and "
            f"this request may reach {num_tokens}"
        )
    return ""


def terms_of(request: Request, parts: Parts, *, is_refused: bool) -> tuple[Terms, str]:
    """What the request may reuse, and what the quality budget has to say about it."""
    if is_refused:
        return Terms("off", request.tenant), ""
    if request.reuse != "auto":
        return Terms(request.reuse, request.tenant), ""
    if not parts.model.rotations:
        return Terms("exact", request.tenant), parts.model.rotation_refusal
    allowed = parts.guard.terms(parts.workload(request.tenant))
    if not allowed.allows_moved:
        return Terms("exact", request.tenant), allowed.note
    return Terms("auto", request.tenant, allowed.ratio), allowed.note
