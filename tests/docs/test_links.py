"""Links in the Markdown files of the project lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from pages import DOCS, FENCE, ROOT

FILES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    ROOT / "benchmarks/report/report.md",
]
LINK = re.compile(
    r"\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE
)
INLINE_CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
TARGET = re.compile(r"^\(([\w-]+)\)=$|<a (?:id|name)=\"([^\"]+)\"", re.MULTILINE)


def links(text: str) -> list[str]:
    """Where a page links to; code is no link."""
    prose = INLINE_CODE.sub("``", FENCE.sub("", text))
    return [first or second for first, second in LINK.findall(prose)]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """All that may stand behind a `#`; a heading that comes again is numbered."""
    found: set[str] = {first or second for first, second in TARGET.findall(text)}
    for heading in HEADING.findall(FENCE.sub("", text)):
        name = base = slug(heading)
        number = 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def dead(page: Path, link: str) -> str | None:
    """What is wrong with a link; addresses of the web are looked at and not called."""
    parts = urlsplit(link)
    if parts.scheme:
        is_good = parts.scheme == "mailto" or (parts.scheme in ("http", "https") and parts.netloc)
        return None if is_good else "no address"
    target = page if not parts.path else page.parent / unquote(parts.path)
    if not target.exists():
        return "no such file"
    if ROOT not in target.resolve().parents:
        return "outside of the project"
    if (
        parts.fragment
        and target.suffix == ".md"
        and parts.fragment not in anchors(target.read_text())
    ):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", FILES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = {link: dead(page, link) for link in links(page.read_text())}
    assert {link: why for link, why in wrong.items() if why} == {}


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("nowhere.md", "no such file"),
        ("README.md#nothing-of-the-kind", "no such heading"),
        ("#nothing-of-the-kind", "no such heading"),
        ("https:/", "no address"),
        ("../../..", "outside of the project"),
        ("README.md", None),
        ("https://example.com/a?b#c", None),
    ],
)
def test_a_dead_link_is_found(link: str, why: str | None) -> None:
    assert dead(ROOT / "ARCHITECTURE.md", link) == why


def test_links_in_code_are_no_links() -> None:
    text = "[a](b.md) `[c](d.md)`\n```text\n[e](f.md)\n```\n![g](h.svg 'x')\n[i]: j.md\n"
    assert links(text)[0] == "b.md" and "d.md" not in links(text) and "f.md" not in links(text)
    assert "j.md" in links(text)


def test_headings_that_come_again_are_numbered() -> None:
    assert anchors("# A `b`\n## C, d!\n## C, d!\n") == {"a-b", "c-d", "c-d-1"}
