"""Writes sections as one HTML page that needs no other file."""

import re
from html import escape
from importlib.resources import files

from kvboost.bench.report.about import machine
from kvboost.bench.report.reading import Results
from kvboost.bench.report.section import NONE, Cells, Part, Picture, Section, Table

_NUMBER = re.compile(r"[\d.,%() to-]+")
# Text this long in a cell may break into lines; shorter cells stay on one.
_LONG = 36


def page(results: Results, sections: list[Section]) -> str:
    """Return the page of a run."""
    run = results.run
    facts = [run["date"], machine(run["machine"]), run["dtype"]]
    facts += [f"commit {run['commit']}"] if run["commit"] else []
    return document(f"KVBoost benchmark: {run['model']}", facts, sections)


def document(title: str, facts: list[str], sections: list[Section]) -> str:
    """Return a page with that heading."""
    style = files("kvboost.bench.report").joinpath("page.css").read_text(encoding="utf-8")
    head = f'<h1>{escape(title)}</h1><p class="facts">{escape(" · ".join(facts))}</p>'
    links = "".join(f'<li><a href="#{s.slug}">{escape(s.title)}</a></li>' for s in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header>{head}</header>\n"
        f"<nav><ol>{links}</ol></nav>\n<main>\n"
        + "\n".join(map(_section, sections))
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    text = " ".join(piece for piece in (section.reading, section.drawn) if piece)
    reading = f'<p class="reading">{_prose(text)}</p>' if text else ""
    return (
        f'<section id="{section.slug}">\n<h2>{escape(section.title)}</h2>\n'
        f'<p class="takeaway">{_prose(section.takeaway)}</p>\n'
        + "\n".join(map(_part, section.parts))
        + f"{reading}\n</section>"
    )


def _part(part: Part) -> str:
    pieces = [f"<h3>{escape(part.title)}</h3>"] if part.title else []
    pieces += [f"<p>{_prose(text)}</p>" for text in part.text]
    if part.code:
        pieces.append(f"<pre><code>{escape(part.code)}</code></pre>")
    shown = []
    if part.pictures:
        shown.append(f'<div class="pictures">{"".join(map(_picture, part.pictures))}</div>')
    if part.table:
        shown.append(_table(part.table))
    is_pair = len(part.pictures) == 1 and part.table is not None and not part.table.fold
    pieces += [f'<div class="pair">{"".join(shown)}</div>'] if is_pair else shown
    return "\n".join(pieces)


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _picture(picture: Picture) -> str:
    return f"<figure><figcaption>{escape(picture.title)}</figcaption>{picture.svg}</figure>"


def _table(table: Table) -> str:
    kinds = [_kind([row[n] for row in table.rows]) for n in range(len(table.columns))]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(title)}</th>'
        for title, kind in zip(table.columns, kinds, strict=True)
    )
    body = "\n".join(_row(row, kinds, table) for row in table.rows)
    # A box that scrolls must be reachable by keyboard.
    made = (
        '<div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )
    if not table.fold:
        return made
    return f"<details><summary>{escape(table.fold)}</summary>{made}</details>"


def _kind(cells: list[str]) -> str:
    if all(cell == NONE or _NUMBER.fullmatch(cell) for cell in cells):
        return "number"
    return "long" if any(len(cell) > _LONG for cell in cells) else "word"


def _row(row: Cells, kinds: list[str], table: Table) -> str:
    cells = "".join(
        f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True)
    )
    css = ' class="ours"' if row[0] in table.marked else ""
    return f"<tr{css}>{cells}</tr>"
