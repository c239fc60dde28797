"""What a client may expect of a server's refusals."""

from __future__ import annotations

import httpx


def fault_of(reply: httpx.Response) -> str:
    """What is wrong with an answer other than 200, empty if nothing is."""
    if "Traceback (most recent" in reply.text:
        return f"a stack trace: {reply.text[:200]}"
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = None
    if not message:
        return f"not an OpenAI error: {reply.text[:200]}"
    if reply.status_code == 503 and "retry-after" not in reply.headers:
        return "a 503 without Retry-After"
    return ""
