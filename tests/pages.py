"""The Markdown pages of the project: what is in them, and which of it can be tried."""

from __future__ import annotations

import doctest
import re
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DATED = {DOCS / "research-log.md"}  # says what was true on a day; so do decisions
PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted(DOCS.rglob("*.md"))
        if page not in DATED and page.parent != DOCS / "adr"
    ),
]
FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<why>(?:(?!-->).)+?)\s*-->\n)?"
    r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=ticks)$",
    re.MULTILINE | re.DOTALL,
)
STATEMENT = re.compile(r"(?:.*\\\n)*.*\n?")  # a line of a script with those that continue it
ONLY_CHECKED = re.compile(
    r"(?:\w+=\S+ )*(?:kvboost serve|kvboost-server|kvboost bench|python benchmarks/run\.py)\b"
)
TIME = re.compile(r"\d[\d,.]* ms")
CONTINUES = "# Continues the example above."
INSTALLS = re.compile(r"pip install\b")


@dataclass(frozen=True)
class Fence:
    """A block of code in a page."""

    language: str
    text: str
    line: int  # of its first line
    why_not_run: str | None


def name_of(page: Path) -> str:
    """How tests are called: `README`, `guides/server`."""
    return str(page.relative_to(DOCS if DOCS in page.parents else ROOT).with_suffix(""))


def fences(page: Path) -> list[Fence]:
    """The blocks of code of a page, in their order."""
    text = page.read_text()
    return [
        Fence(
            language=found["language"].strip(),
            text=textwrap.dedent(found["text"]),
            line=text.count("\n", 0, found.start("text")) + 1,
            why_not_run=found["why"],
        )
        for found in FENCE.finditer(text)
    ]


def outputs(page: Path) -> dict[int, str]:
    """What a page shows right below its Python, by the line of that."""
    return {
        code.line: below.text
        for code, below in pairwise(fences(page))
        if (code.language, below.language) == ("python", "text")
        # Between the two: the ends of both fences, and a blank line at most.
        and below.line - code.line - code.text.count("\n") <= 3
    }


def is_shown(shown: str, printed: str) -> bool:
    """Whether this was printed: times differ, `...` stands for anything, blanks end no line."""
    texts = [
        "".join(f"{line.rstrip()}\n" for line in TIME.sub("0 ms", each).splitlines())
        for each in (shown, printed)
    ]
    return doctest.OutputChecker().check_output(*texts, doctest.ELLIPSIS)


def statements(script: str) -> list[str]:
    """The lines of a script, each with those that continue it."""
    return [each for each in STATEMENT.findall(script) if each]


def what_runs(script: str) -> str:
    """A script without what is checked only, and without installations."""
    left_out = (ONLY_CHECKED, INSTALLS)
    return "".join(
        each for each in statements(script) if not any(one.match(each) for one in left_out)
    )


def does_nothing(script: str) -> bool:
    """Whether a script has blank lines and comments only."""
    return all(not line.strip() or line.startswith("#") for line in script.splitlines())
