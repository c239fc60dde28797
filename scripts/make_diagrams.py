"""Draw the diagrams of the docs: rows of a prompt, the stages, the tiers, memory, a fleet; a plot.

Boxes, arrows and text by their coordinates; the same bytes every time. Colours are those of the
reader's system, light or dark.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from kvboost.bench.report.picture import readme_picture

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH = 780
CELL, NUM_CELLS = 17, 24
STYLE = """
.paper{fill:#fbfcfc}.box{fill:#fff;stroke:#50626b}.line{fill:none;stroke:#50626b;stroke-width:1.5}
.tip{fill:#50626b}text{fill:#1d2a30;font:15px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.bold{font-weight:600}.small{font-size:13px;fill:#50626b}.mid{text-anchor:middle}.end{text-anchor:end}
.stored{fill:#a9ddd4;stroke:#0b6e63}.moved{fill:#f7dfae;stroke:#a8690a}
.computed{fill:#0b6e63;stroke:#0b6e63}.repaired{fill:#d98a12;stroke:#a8690a}
@media (prefers-color-scheme:dark){.paper{fill:#161d21}.box{fill:#222c31;stroke:#93a5ad}
.line{stroke:#93a5ad}.tip{fill:#93a5ad}text{fill:#e4ebee}.small{fill:#a9b8bf}
.stored{fill:#1d4a44;stroke:#5fc9bb}.moved{fill:#4d3a16;stroke:#e0a94a}
.computed{fill:#5fc9bb;stroke:#5fc9bb}.repaired{fill:#e0a94a;stroke:#e0a94a}}
"""
Point = tuple[float, float]


class Drawing:
    """Shapes in the order in which they were drawn."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write a line; `mid` in `kind` centres it at x."""
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a rectangle with its upper left corner at x, y."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'class="{kind}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, *lines: str) -> None:
        """Draw a box with a title in it and small lines below that."""
        self.rectangle(x, y, width, height, "box")
        first = y + height / 2 + 5 - 9.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            kind = "mid small" if number else "mid bold"
            self.text(x + width / 2, first + 19 * number, line, kind)

    def arrow(self, *points: Point, is_dashed: bool = False) -> None:
        """Draw a line through the points with a tip at the last."""
        path = "M" + "L".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        self._shapes.append(f'<path class="line"{dashes} d="{path}"/>')
        (x0, y0), (x, y) = points[-2:]
        along = ((x > x0) - (x < x0), (y > y0) - (y < y0))
        back, side = (x - 9 * along[0], y - 9 * along[1]), (5 * along[1], 5 * along[0])
        corners = [(x, y), (back[0] + side[0], back[1] + side[1])]
        corners.append((back[0] - side[0], back[1] - side[1]))
        tip = " ".join(f"{cx:g},{cy:g}" for cx, cy in corners)
        self._shapes.append(f'<polygon class="tip" points="{tip}"/>')

    def cells(self, x: float, y: float, row: str) -> None:
        """Draw positions of a prompt: a letter each, as in CELLS."""
        for number, letter in enumerate(row):
            self.rectangle(x + number * CELL, y, CELL - 3, 22, CELLS[letter])

    def svg(self) -> str:
        """The picture."""
        size = f'width="{WIDTH}" height="{self._height}" viewBox="0 0 {WIDTH} {self._height}"'
        paper = f'<rect width="{WIDTH}" height="{self._height}" rx="10" class="paper"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        parts = [head, f"<title>{escape(self._title)}</title>", f"<style>{STYLE}</style>", paper]
        return "\n".join([*parts, *self._shapes, "</svg>", ""])


CELLS = {"s": "stored", "m": "moved", "c": "computed", "r": "repaired"}


def sparse_prefill() -> str:
    """Which rows of a prompt are filled, and which are computed."""
    drawing = Drawing("Sparse prefill: only the positions in S are computed", 268)
    rows = (
        ("cold prompt", "c" * 24, "S: all positions"),
        ("cached prefix", "s" * 18 + "c" * 6, "S: the rest"),
        (
            "moved documents",
            "sss" + "rmmmrmm" + "cc" + "rmmmmrmm" + "cccc",
            "S: gaps, rest, repairs",
        ),
        ("decode step", "s" * 23 + "c", "S: the newest"),
    )
    drawing.text(24, 32, "One row of K/V for each position of the prompt", "bold")
    for number, (name, row, chosen) in enumerate(rows):
        y = 54 + 42 * number
        drawing.text(24, y + 16, name)
        drawing.cells(184, y, row)
        drawing.text(184 + NUM_CELLS * CELL + 12, y + 16, chosen, "small")
    legend = (
        ("s", "from the cache"),
        ("m", "from the cache, moved"),
        ("r", "moved, repaired"),
        ("c", "computed"),
    )
    for number, (letter, meaning) in enumerate(legend):
        x = (24, 184, 384, 616)[number]
        drawing.cells(x, 228, letter)
        drawing.text(x + 22, 244, meaning, "small")
    return drawing.svg()


def stages() -> str:
    """The way of a prompt through the stages, and the store beside it."""
    drawing = Drawing(
        "The stages of a prompt: chunks, keys, lookup, place, repair, run, store", 230
    )
    names = (
        ("chunks", "split"),
        ("keys", "hash"),
        ("lookup", "find"),
        ("place", "copy, rotate"),
        ("repair", "choose S"),
        ("run", "compute S"),
        ("store", "save"),
    )
    width, gap = 88, 18
    for number, (name, does) in enumerate(names):
        x = 30 + number * (width + gap)
        drawing.box(x, 40, width, 62, name, does)
        if number:
            drawing.arrow((x - gap, 71), (x, 71))
    lookup, place, store = (30 + n * (width + gap) + width / 2 for n in (2, 3, 6))
    drawing.box(lookup - 44, 160, store - lookup + 88, 46, "the cache: memory, disk, shared")
    drawing.arrow((lookup, 102), (lookup, 160), is_dashed=True)
    drawing.text(lookup - 10, 136, "keys", "small end")
    drawing.arrow((place, 160), (place, 102))
    drawing.text(place + 10, 136, "K/V", "small")
    drawing.arrow((store, 102), (store, 160))
    drawing.text(store - 160, 136, "K/V, after the output", "small")
    drawing.text(30, 28, "prompt tokens", "small")
    drawing.text(30 + 5 * (width + gap), 28, "first output token", "small")
    return drawing.svg()


def tiers() -> str:
    """Where K/V lies, how it comes up and goes down."""
    drawing = Drawing(
        "Tiers: hits are loaded into memory, new K/V is written down by other threads", 330
    )
    drawing.box(250, 20, 280, 46, "the engine prefills a prompt")
    drawing.box(150, 108, 480, 54, "memory", "always there: max_cache_bytes")
    drawing.box(40, 218, 340, 62, "disk", "survives a restart: disk_cache_dir")
    drawing.box(400, 218, 340, 62, "shared", "Redis, Valkey, Mooncake: cache_url")
    for x, low, high, words in (
        (330, 108, 66, "used"),
        (190, 218, 162, "found"),
        (550, 218, 162, "found"),
    ):
        drawing.arrow((x, low), (x, high))
        drawing.arrow((x + 40, high), (x + 40, low))
        drawing.text(x - 10, (low + high) / 2 + 5, words, "small end")
        behind = "stays" if low == 108 else "written in the background"
        drawing.text(x + 50, (low + high) / 2 + 5, behind, "small")
    bound = (
        "A dead tier is a miss after tier_deadline_ms; of a slow one, what arrives in time is used."
    )
    drawing.text(WIDTH / 2, 312, bound, "small mid")
    return drawing.svg()


def kv_memory() -> str:
    """One pool for running requests and stored chunks; frames below it."""
    drawing = Drawing("One pool holds the K/V of running requests and of stored chunks", 400)
    drawing.text(40, 34, "request A", "bold")
    drawing.text(40, 74, "request B", "bold")
    drawing.text(740, 34, "block tables: runs of rows, the prefix shared", "small end")
    row = "ssssssssssss" + "mmmm" + "cccc" + "...." + "mmmmmm" + "...."
    left = 40
    for number, letter in enumerate(row):
        kind = {"s": "stored", "m": "moved", "c": "computed", ".": "box"}[letter]
        drawing.rectangle(left + number * 20.5, 130, 17, 40, kind)
    middle = left + 6 * 20.5
    drawing.arrow((130, 30), (middle, 30), (middle, 126))
    drawing.arrow((130, 70), (middle - 20, 70), (middle - 20, 126))
    drawing.arrow((middle, 30), (left + 18 * 20.5, 30), (left + 18 * 20.5, 126))
    drawing.arrow((middle - 20, 70), (left + 14 * 20.5, 70), (left + 14 * 20.5, 126))
    drawing.text(40, 196, "shared prefix, also a stored chunk", "small")
    drawing.text(left + 13 * 20.5, 196, "rows of B and A", "small")
    drawing.text(left + 24 * 20.5, 196, "stored chunks, evictable", "small")
    drawing.text(40, 222, "KV pool: max_cache_bytes", "bold")
    drawing.box(40, 300, 340, 62, "disk", "frames: disk_cache_dir")
    drawing.box(400, 300, 340, 62, "shared", "frames: cache_url")
    for x in (150, 510):
        drawing.arrow((x, 230), (x, 300))
        drawing.text(x - 10, 270, "writer thread", "small end")
        drawing.arrow((x + 60, 300), (x + 60, 230))
        drawing.text(x + 70, 270, "loader thread", "small")
    drawing.text(WIDTH / 2, 388, "The engine's thread copies nothing for exact hits.", "small mid")
    return drawing.svg()


def fleet() -> str:
    """Requests, the ingress, the router, replicas and what they share."""
    drawing = Drawing(
        "A fleet: the router prefers the replica that has cached most of a prompt", 330
    )
    drawing.box(24, 120, 110, 56, "clients", "OpenAI's API")
    drawing.box(190, 120, 120, 56, "ingress", "keys, retries")
    drawing.box(190, 236, 120, 56, "router", "who has it?")
    drawing.arrow((134, 148), (190, 148))
    drawing.arrow((250, 176), (250, 236), is_dashed=True)
    for number in range(3):
        y = 40 + 96 * number
        drawing.box(400, y, 150, 56, f"replica {number + 1}", "engine, memory")
        drawing.arrow((310, 148), (355, 148), (355, y + 28), (400, y + 28))
        drawing.arrow((550, y + 28), (612, y + 28))
    drawing.box(612, 40, 148, 248, "shared tier", "what one computes,", "all can load")
    drawing.arrow((475, 288), (475, 312), (250, 312), (250, 292), is_dashed=True)
    drawing.text(486, 316, "cached text, every five seconds", "small")
    return drawing.svg()


DRAWN = {
    "sparse-prefill.svg": sparse_prefill,
    "stages.svg": stages,
    "tiers.svg": tiers,
    "kv-memory.svg": kv_memory,
    "fleet.svg": fleet,
    "first-token.svg": partial(readme_picture, ROOT / "benchmarks" / "report" / "results.jsonl"),
}

if __name__ == "__main__":
    for name, draw in DRAWN.items():
        (PICTURES / name).write_text(draw())
