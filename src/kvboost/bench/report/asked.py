"""Sections on the questions asked of ours alone: a table for each, and pictures where they help."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvboost.bench.report.reading import Line, Results, by_phase, grouped, known
from kvboost.bench.report.section import Part, Picture, Section, plain, ratio_bar, table
from kvboost.drawing import plots
from kvboost.drawing.plots import Scale

RATIO = Scale("time, generate() = 1, left is faster", is_log=True, mark=1.0)
_TOP1 = (
    "top-1 here is agreement with the same model's full prefill in the same dtype, over 4 tokens"
    " of each prompt: a sanity check, not a measure of quality."
)
_REPAIRS = (
    "A repair recomputes a share of the moved tokens: none recomputes no token, heads only the"
    " first tokens of each document. A full prefill is our own with reuse off. KL is the divergence"
    " of the output probabilities from a full prefill's, in nats; top-1 is how often both choose"
    " the same token, over 16 tokens of each prompt. This is one workload of independent documents"
    " with few prompts; docs/concepts/exact-and-moved.md has more prompts, models and tasks."
)


@dataclass(frozen=True)
class Curves:
    """Draws some fields of rows over another: a picture for each value of `panels`.

    With `by`, which takes one field, there is a line for each value of that.
    """

    x: str
    fields: Mapping[str, tuple[str, str]]  # what each is called, and its style class
    x_scale: Scale
    y_scale: Scale
    panels: str = ""
    by: str = ""

    def __call__(self, title: str, rows: Sequence[Line]) -> list[Picture]:
        """The pictures of a question."""
        whole = known(rows, self.x, *self.fields)
        return [
            _picture(panel or title, plots.lines, self._lines(own), self.x_scale, self.y_scale)
            for panel, own in grouped(whole, self.panels, by_phase).items()
        ]

    def _lines(self, rows: Sequence[Line]) -> list[plots.Line]:
        if not self.by:
            return [self._line(rows, field, *named) for field, named in self.fields.items()]
        (field,) = self.fields
        return [
            self._line(own, field, f"{plain(value)} {self.by}", f"shade{number % 4}")
            for number, (value, own) in enumerate(grouped(rows, self.by).items())
        ]

    def _line(self, rows: Sequence[Line], field: str, name: str, css: str) -> plots.Line:
        points = tuple((_value(row, self.x), _value(row, field)) for row in rows)
        return plots.Line(name, css, points)


def _bars(name: str) -> Callable[[str, Sequence[Line]], list[Picture]]:
    """Ratios as bars that a field names, a picture for each phase."""

    def draw(title: str, rows: Sequence[Line]) -> list[Picture]:
        whole = known(rows, "ratio")
        over = [row["ratio"] for row in whole]
        made = []
        for phase, own in grouped(whole, "phase", by_phase).items():
            bars = [ratio_bar(row[name], "ours", row) for row in own]
            made.append(_picture(phase or title, plots.bars, bars, RATIO, over=over))
        return made

    return draw


def _repairs(_: str, rows: Sequence[Line]) -> list[Picture]:
    x = Scale("first token, full prefill = 1")
    ordered = sorted(known(rows, "ratio"), key=lambda row: float(row["ratio"]))
    made = []
    for title, field, y in (
        ("Same token by repair", "top1", Scale("top-1, %")),
        ("Distance by repair", "kl", Scale("KL, nats", is_log=True)),
    ):
        # A distance of nothing (everything computed again) has no place on a log scale.
        shown = [row for row in known(ordered, field) if row[field] > 0]
        named = [plots.Point(r["repair"], "ours", r["ratio"], _value(r, field)) for r in shown]
        if named:
            made.append(_picture(title, plots.points, named, x, y, is_joined=True))
    return made


def _picture(title: str, draw: Callable[..., str], *drawn: object, **how: object) -> Picture:
    return Picture(title, draw(*drawn, title=title, **how))


def _value(row: Line, field: str) -> float:
    is_share = field == "top1" or field.endswith(("share", "_rate"))
    return (100 if is_share else 1) * float(row[field])


@dataclass(frozen=True)
class Shown:
    """How a question is shown."""

    title: str
    asks: str
    first: tuple[str, ...] = ()  # columns of the table, before all others
    draw: Callable[[str, Sequence[Line]], list[Picture]] = lambda title, rows: []
    reading: str = _TOP1
    drawn: str = ""


_TIMES = {"ours_ms": ("kvboost", "ours"), "bare_ms": ("generate()", "transformers")}
_HITS = {
    "hit_rate": ("exact and moved", "ours"),
    "exact_hit_rate": ("exact only", "transformers"),
}
SHOWN = {
    "frontier": Shown(
        "Quality against speed",
        "How much of moved text must be computed again, and what does that cost?",
        ("repair", "computed_share", "ttft_ms", "full_ms", "ratio"),
        _repairs,
        _REPAIRS,
        "Up and to the left is better: faster at the same quality.",
    ),
    "length": Shown(
        "By prompt length",
        "How does the time to the first token grow with the prompt?",
        ("phase", "tokens", "ours_ms", "bare_ms", "ratio"),
        Curves(
            "tokens", _TIMES, Scale("prompt tokens", is_log=True),
            Scale("first token, ms", is_log=True), panels="phase",
        ),
        drawn="Reuse pays from where the lines cross.",
    ),
    "share": Shown(
        "By share of the prompt that is reused",
        "How does the time to the first token fall with the share of the prompt that is reused?",
        ("phase", "tokens", "share", "ours_ms", "bare_ms", "ratio"),
        Curves(
            "share", {"ratio": ("", "")}, Scale("share reused, %"),
            Scale("time, generate() = 1", mark=1.0), panels="phase", by="tokens",
        ),
        drawn="The strong line is break-even: below it, reuse is faster than generate(). To the"
        " left of the crossing, lookup and loading cost more than they save.",
    ),
    "modes": Shown(
        "Modes",
        "What does each mode of reuse cost and gain?",
        ("mode", "phase", "ttft_ms", "total_ms", "bare_ms", "ratio"),
        _bars("mode"),
        "off is our prefill without reuse; below 1, it is faster than generate() even so. exact"
        " reuses cached prefixes, auto also moved text; deterministic is slower and gives the same"
        f" bits each time. {_TOP1}",
    ),
    "chunk": Shown(
        "Chunk size and window",
        "How large should chunks be, and may their borders move to the end of a line?",
        ("chunk_size", "window", "ttft_ms", "bare_ms", "ratio"),
        Curves(
            "chunk_size", {"ratio": ("", "")}, Scale("tokens of a chunk", is_log=True),
            Scale("first token, generate() = 1"), by="window",
        ),
        f"The found share is the share of the prompt found in the cache. {_TOP1}",
    ),
    "memory": Shown(
        "Memory, and when storing pays",
        "What does stored K/V weigh, and how often must text come back until storing it has paid?",
        ("bits", "tokens", "kv_bytes_per_token", "store_ms", "load_ms", "prefill_ms"),
        Curves(
            "tokens", {"break_even_requests": ("", "")}, Scale("tokens stored", is_log=True),
            Scale("hits until storing has paid", from_zero=True), by="bits",
        ),
        "Storing is paid for once; each hit saves the difference between a cold and a warm first"
        f" token. Break-even is the number of hits after which storing has paid. {_TOP1}",
    ),
    "hits": Shown(
        "Hit rates of a cache that is too small",
        "How often is text found again when the store cannot hold it all?",
        ("pattern", "cache_share"),
        Curves(
            "cache_share", _HITS, Scale("cache size, % of all documents"),
            Scale("hits, %", from_zero=True), panels="pattern",
        ),
        "Without a model: the real index and eviction, with requests for documents that are equally"
        " frequent (uniform), much more frequent for some (zipf), or repeated soon (temporal).",
    ),
}  # fmt: skip


def questions(results: Results) -> list[Section]:
    """A section for each question that was asked, those that are no longer asked at the end."""
    names = dict.fromkeys([*SHOWN, *results.questions])
    return [_section(name, rows) for name in names if (rows := results.asked(name))]


def _section(name: str, rows: Sequence[Line]) -> Section:
    shown = SHOWN.get(name) or Shown(name.capitalize(), "A question of earlier versions.")
    pictures = shown.draw(shown.title, rows)
    figures = table(rows, *shown.first, fold="All figures" if len(pictures) > 1 else "")
    part = Part(pictures=pictures, table=figures)
    return Section(name, shown.title, shown.asks, [part], shown.reading, shown.drawn)
