"""`kvboost doctor`: what a model can do on this machine, and what to set."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from kvboost.cli import flags
from kvboost.cli.loading import quieten

LOADED_WITH = ("model", "gguf_file", "dtype", "device")


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Certifies a model, measures prefill, decode and tiers on this machine, and recommends "
        "settings. Shared stores: Redis and Valkey only. Exit code 1 if the model's K/V cannot be "
        "reused. With --vllm: what the connector does in a running vLLM, by its metrics.",
        "kvboost doctor --model FOLDER",
        "kvboost doctor --model FOLDER --disk-cache-dir kv-cache --cache-url redis://127.0.0.1:6379",
        "kvboost doctor --vllm http://127.0.0.1:8000",
    )
    parser.set_defaults(run=_doctor)
    flags.add_model(parser, is_required=False)
    text = "a running vLLM instead of a model (its --api-key as KVBOOST_VLLM_KEY)"
    parser.add_argument("--vllm", metavar="URL", help=text)
    flags.add_tiers(parser, reads=False)
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to measure after loading and certification (default: 60)",
    )
    flags.add_json(parser)


def _doctor(options: argparse.Namespace) -> int:
    if not 0 < options.seconds < 1e6:
        options.fail(f"--seconds={options.seconds}: expected a number above 0, and below a million")
    if options.vllm:
        return _vllm(options)
    if not options.model:
        options.fail("--model or --vllm is required")
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


def _vllm(options: argparse.Namespace) -> int:
    from kvboost.bench.doctor.page import aligned, coloured  # noqa: PLC0415
    from kvboost.connectors.vllm.checkup import check_up, said, table  # noqa: PLC0415

    found = check_up(options.vllm)
    findings = list(said(found))
    if options.json:
        named = [{"level": level, "text": text} for level, text in findings]
        sys.stdout.write(json.dumps(asdict(found) | {"findings": named}, indent=2) + "\n")
    else:
        lines = [*aligned(table(found)), ""] if found.is_active else []
        lines += [f"{coloured(level)}  {text}" for level, text in findings]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0 if found.is_active else 1


def _given(options: argparse.Namespace) -> dict[str, str]:
    """The loading arguments, under the server's names for them."""
    values = {name: getattr(options, name) for name in LOADED_WITH}
    return {name: value for name, value in values.items() if value not in (None, "auto")}
