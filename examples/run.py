"""Run the examples: each prompt with and without reuse, and a table at the end.

python examples/run.py --list
python examples/run.py --example rag --model FOLDER
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

EXAMPLES = {
    "chatbot": "a chatbot with house rules; in a terminal, type your own questions",
    "rag": "documents in any order, moved and repaired (approximate)",
    "fewshot": "many examples before each text to classify",
    "multiturn": "a conversation with a growing history",
    "code": "questions about a file, and an edit that copies from it",
}
# A code.py here would hide the standard library's from all that runs in this folder: notebooks too.
FILES = {name: name for name in EXAMPLES} | {"code": "coding"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    about, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about,
        epilog=f"{usage}\nSettings: examples/.env, see examples/.env.example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="list the examples")
    parser.add_argument(
        "--example", default="all", metavar="NAME", help="run one example (default: all)"
    )
    parser.add_argument("--model", help="name, folder or GGUF file (default: KVBOOST_MODEL)")
    parser.add_argument("--demo", action="store_true", help="use the scripted chatbot questions")
    options = parser.parse_args(arguments)
    if options.example not in (*EXAMPLES, "all"):
        near = difflib.get_close_matches(options.example, EXAMPLES, n=1, cutoff=0.0)
        parser.error(f"no example {options.example!r}; did you mean {near[0]!r}? See --list")
    return options


def listed() -> str:
    return "\n".join(f"{name:<10} {about}" for name, about in EXAMPLES.items())


def main() -> None:
    options = parse()
    if options.list:
        print(listed())
        return
    try:
        from rich.console import Console  # noqa: PLC0415

        from examples import common  # noqa: PLC0415  (loads torch)
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed: pip install '.[examples]'")
    settings = common.read_settings(ROOT / "examples" / ".env", os.environ, options.model)
    names = list(EXAMPLES) if options.example == "all" else [options.example]
    console = Console()
    console.print(run(names, settings, console, is_demo=options.demo or len(names) > 1))


def run(names: list[str], settings: Any, console: Any, *, is_demo: bool) -> Any:
    """Run examples one after another; returns the table."""
    from examples import common  # noqa: PLC0415

    trials = {}
    with console.status("loading the model"):
        engine = common.make_engine(settings)
    with engine:
        for name in names:
            console.rule(f"{name}: {EXAMPLES[name]}")
            trials[name] = common.Trial(engine, console, settings, is_demo=is_demo)
            importlib.import_module(f"examples.{FILES[name]}").run(engine, trials[name])
    model = Path(settings.model or "SmolLM2-135M-Instruct").name
    title = f"{model}, {settings.dtype}, {os.cpu_count()} cores ({platform.machine()})"
    return common.table(trials, title)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # for `import examples`; Python has put this file's folder there
    main()
