"""Ray is imported here, once: some of it warns, and the tests take warnings for errors."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve.request_router  # noqa: F401
