"""`kvboost doctor`: what a model can do on this machine, and what to set."""

from __future__ import annotations

import argparse
import sys
import time

from kvboost.cli import flags
from kvboost.cli.loading import quieten

LOADED_WITH = ("model", "gguf_file", "dtype", "device")


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Certifies a model, measures prefill, decode and tiers on this machine, and recommends "
        "settings. Shared stores: Redis and Valkey only. Exit code 1 if the model's K/V cannot be "
        "reused.",
        "kvboost doctor --model FOLDER",
        "kvboost doctor --model FOLDER --disk-cache-dir kv-cache --cache-url redis://127.0.0.1:6379",
    )
    parser.set_defaults(run=_doctor)
    flags.add_model(parser)
    flags.add_tiers(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to measure after loading and certification (default: 60)",
    )
    flags.add_json(parser)


def _doctor(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        options.fail(f"--seconds={options.seconds}: expected a number above 0")
    quieten()
    from kvboost.bench.doctor.advice import settings  # noqa: PLC0415
    from kvboost.bench.doctor.diagnosis import findings  # noqa: PLC0415
    from kvboost.bench.doctor.page import print_json, print_page  # noqa: PLC0415
    from kvboost.bench.doctor.visit import Wishes, visit  # noqa: PLC0415  (loads torch)

    wishes = Wishes(
        model=options.model,
        dtype=options.dtype,
        device=options.device,
        gguf_file=options.gguf_file,
        disk_dir=options.disk_cache_dir,
        redis_url=options.cache_url,
        seconds=options.seconds,
    )
    started = time.perf_counter()

    def say(what: str) -> None:
        sys.stderr.write(f"{time.perf_counter() - started:6.1f} s  {what}\n")

    found = visit(wishes, say)
    said = findings(found)
    advised = settings(found, options.disk_cache_dir, options.cache_url)
    if options.json:
        print_json(found, said, advised)
    else:
        print_page(_given(options), found, said, advised)
    return 1 if found.model.refusal else 0


def _given(options: argparse.Namespace) -> dict[str, str]:
    """What the model was loaded with, by the names that the server has for it."""
    values = {name: getattr(options, name) for name in LOADED_WITH}
    return {name: value for name, value in values.items() if value not in (None, "auto")}
