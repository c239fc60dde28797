"""`kvboost doctor`: what a model can do on this machine, and what to set."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from kvboost.bench.doctor.advice import settings
from kvboost.bench.doctor.diagnosis import findings
from kvboost.bench.doctor.page import print_json, print_page
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.cli.main import Commands


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    doctor = commands.add_parser(
        "doctor",
        help="certify a model, measure it on this machine, and recommend settings",
        description="Certifies a model, measures prefill, decoding and tiers on this machine, and "
        "recommends settings. Exit code 1 if the model's K/V cannot be reused.",
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--model", required=True, help="name, folder or GGUF file of the model")
    doctor.add_argument("--gguf-file", help="GGUF file in the folder or repository of --model")
    doctor.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights (default: as they are stored)",
    )
    doctor.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    doctor.add_argument("--disk-dir", help="measure a disk tier in this folder")
    doctor.add_argument("--redis-url", help="measure a Redis or Valkey server: redis://host:port")
    doctor.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="time to measure, once the model is loaded and certified (default: 60)",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")


def _doctor(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        raise ConfigError(f"--seconds={options.seconds}: expected a number above 0")
    from kvboost.bench.doctor.visit import Wishes, visit  # noqa: PLC0415  (loads torch)

    wishes = Wishes(
        model=options.model,
        dtype=options.dtype,
        device=options.device,
        gguf_file=options.gguf_file,
        disk_dir=options.disk_dir,
        redis_url=options.redis_url,
        seconds=options.seconds,
    )
    started = time.perf_counter()

    def say(what: str) -> None:
        sys.stderr.write(f"{time.perf_counter() - started:6.1f} s  {what}\n")

    found = visit(wishes, say)
    said = findings(found)
    advised = settings(found, options.disk_dir, options.redis_url)
    if options.json:
        print_json(found, said, advised)
    else:
        print_page(_given(options), found, said, advised)
    return 1 if found.model.refusal else 0


def _given(options: argparse.Namespace) -> dict[str, str]:
    """What the model was loaded with, by the names that the server has for it."""
    values = {name: getattr(options, name) for name in ("model", "gguf_file", "dtype", "device")}
    return {name: value for name, value in values.items() if value not in (None, "auto")}
