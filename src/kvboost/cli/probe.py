"""`kvboost probe`: is the cache of any OpenAI-compatible server right, fast and separate?"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.cli import flags
from kvboost.errors import KVBoostError, missing_packages

if TYPE_CHECKING:
    from kvboost.probe import Finding, Report


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flags.about(
        parser,
        "Sends prompts with planted facts to an OpenAI-compatible server (vLLM, SGLang, llama.cpp, "
        "LMCache, KVBoost, hosted ones) and judges its prefix cache: are answers from the cache "
        "those of new prompts, is a hit faster, can one client see what another one asked. At most "
        "200 requests, 400,000 tokens and 2 minutes, 8 requests at a time; nobody else is asked. "
        "Needs httpx and rich, no model and no torch. Exit code 1 if something is wrong.",
        "kvboost probe http://127.0.0.1:8000/v1",
        "kvboost probe http://127.0.0.1:8000/v1 --light --json",
        "kvboost probe URL --key KEY --other-key KEY2 --html probe.html",
        "kvboost probe URL --before answers.json  # restart the server, then --after answers.json",
        "kvboost probe URL --light --watch 10 --metrics /var/lib/node_exporter/kvboost.prom",
    )
    parser.set_defaults(run=_probe)
    add = parser.add_argument
    add("url", metavar="URL", help="base URL of the API, with its /v1")
    add("--model", metavar="MODEL", help="name of the model (default: the first that is listed)")
    key, other = (os.environ.get(f"KVBOOST_PROBE_{name}", "") for name in ("KEY", "OTHER_KEY"))
    text = "API key; safer as KVBOOST_PROBE_KEY: other users can see flags"
    add("--key", default=key, metavar="KEY", help=text)
    text = (
        "key of another client, who must not see what the first one asked (KVBOOST_PROBE_OTHER_KEY)"
    )
    add("--other-key", default=other, metavar="KEY", help=text)
    text = "requests with different cache_salt must be separate: say red if they are not"
    add("--salt", action="store_true", help=text)
    _add_sizes(parser)
    restart = parser.add_mutually_exclusive_group()
    text = "ask new prompts and write them with their answers; restart the server, then --after"
    restart.add_argument("--before", type=Path, metavar="FILE", help=text)
    text = "compare with the answers of --before"
    restart.add_argument("--after", type=Path, metavar="FILE", help=text)
    text = "request log of the server: add what reuse would save (see kvboost analyze)"
    add("--log", type=Path, metavar="LOG", help=text)
    add("--html", type=Path, metavar="FILE", help="also write a page")
    add("--metrics", type=Path, metavar="FILE", help="also write Prometheus text")
    flags.add_json(parser)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Flags for how much is asked, and how often."""
    add = parser.add_argument
    add("--light", action="store_true", help="at most 120 requests, one at a time")
    add("--load", type=int, metavar="N", help="requests at a time (default: 8; --light: 1)")
    add("--yes", action="store_true", help="do not ask before requests are sent")
    text = "probe again every so many minutes, until Ctrl+C"
    add("--watch", type=float, metavar="MINUTES", help=text)


def _probe(options: argparse.Namespace) -> int:
    try:
        import httpx  # noqa: F401, PLC0415
        import rich  # noqa: F401, PLC0415
    except ImportError as error:
        raise KVBoostError(missing_packages("probe", "httpx rich")) from error
    _check(options)
    if not _is_agreed(options):
        return 0
    if options.watch is None:
        return 0 if _once(options).ok else 1
    while True:
        try:
            _once(options)
        except (KVBoostError, OSError) as error:  # a server that is restarted is probed again later
            sys.stderr.write(f"kvboost: {error}\n")
            if options.metrics:
                from kvboost.probe.report import as_failure  # noqa: PLC0415

                _write_metrics(options.metrics, as_failure(time.time()))
        time.sleep(60 * options.watch)


def _check(options: argparse.Namespace) -> None:
    if options.load is not None and not 1 <= options.load <= 64:
        options.fail("--load: expected a number from 1 to 64")
    if options.watch is not None and not 0 < options.watch < 1e6:
        options.fail("--watch: expected a number of minutes above 0")
    if options.watch is not None and (options.before or options.after):
        options.fail("--watch: not with --before or --after, which are two single runs")
    for file in (options.html, options.metrics, options.before):
        if file is not None and not file.resolve().parent.is_dir():
            options.fail(f"{file}: there is no such folder")


def _is_agreed(options: argparse.Namespace) -> bool:
    if options.yes or options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    most, load = (120, 1) if options.light else (200, 8)
    size = f"{most} requests, {options.load or load} at a time"
    answer = input(f"Send up to {size}, to {options.url}? [Y/n] ")
    return answer.strip().lower() in ("", "y", "yes")


def _once(options: argparse.Namespace) -> Report:
    from kvboost.probe import run  # noqa: PLC0415
    from kvboost.probe.report import as_metrics, as_page, as_table  # noqa: PLC0415

    gain = _gain(options.log) if options.log else None
    report = run(
        options.url,
        model=options.model,
        key=options.key,
        other_key=options.other_key,
        salt=options.salt,
        light=options.light,
        load=options.load,
        before=options.before,
        after=options.after,
    )
    if gain is not None:
        report = replace(report, findings=(*report.findings, gain))
    if options.json:
        sys.stdout.write(json.dumps(report.as_json(), indent=None if options.watch else 2) + "\n")
        sys.stdout.flush()
    else:
        from rich.console import Console  # noqa: PLC0415

        Console(soft_wrap=False).print(as_table(report))
    if options.html:
        options.html.write_text(as_page(report), encoding="utf-8")
    if options.metrics:
        _write_metrics(options.metrics, as_metrics(report, time.time()))
    return report


def _write_metrics(file: Path, text: str) -> None:
    """Write the file atomically: others may read it at any moment."""
    made = file.with_name(f"{file.name}.new")
    made.write_text(text, encoding="utf-8")
    made.replace(file)


def _gain(log: Path) -> Finding:
    """What the requests of a log would reuse with unlimited memory."""
    from kvboost.analyze.curve import follow  # noqa: PLC0415
    from kvboost.analyze.logs import read  # noqa: PLC0415
    from kvboost.probe import Finding  # noqa: PLC0415

    found = follow(read(log), [], [])
    if not found.num_requests:
        raise KVBoostError(f"{log} has no requests")
    prefix = max(curve.share().value for curve in found.prefix.values())
    said = f"Of the prompt tokens in {log.name}, a prefix cache can reuse {prefix:.0%}"
    figures = {"requests": found.num_requests, "prefix": round(prefix, 3)}
    if found.content is not None:
        anywhere = found.content.share().value
        figures["anywhere"] = round(anywhere, 3)
        said += f", reuse anywhere {anywhere:.0%}"
    return Finding("gain", "traffic", "green", f"{said} (with memory for all).", figures)
