import html.parser
import re
import shutil
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvboost.bench import records
from kvboost.bench.report.compared import outcome
from kvboost.bench.report.markdown import readme_sentence, readme_table
from kvboost.bench.report.reading import OURS, by_system, family, read_results
from kvboost.bench.report.section import NONE
from kvboost.bench.report.write import read_notes, sections, write_report
from kvboost.errors import KVBoostError


def measure(system, ratio, **changes):
    baseline_ms = changes.pop("baseline_ms", 500.0)
    line = {
        "kind": "measure",
        "workload": "all",
        "phase": "warm",
        "metric": "ttft",
        "system": system,
        "baseline": "transformers",
        "system_ms": ratio * baseline_ms,
        "baseline_ms": baseline_ms,
        "ratio": ratio,
        "low": ratio * 0.9,
        "high": ratio * 1.1,
        "pairs": 18,
        "top1": 0.98,
        "baseline_top1": 0.985,
        "score": None,
        "baseline_score": None,
        "prompt_tokens": 800,
    }
    return line | changes


KEPT = Path(__file__).parents[2] / "benchmarks" / "report"
ABSENT = {"kind": "absent", "system": "vllm", "title": "vLLM", "why": "vllm ended; its log ends"}
RUN = {
    "kind": "run",
    "model": "tiny",
    "dtype": "bf16",
    "seed": 7,
    "rounds": 3,
    "seconds": 600,
    "commit": "abc1234",
    "date": "2026-11-16",
    "is_quick": False,
    "machine": {"cpu": "A & B", "cores": 2, "memory_gb": 24},
    "settings": {"gguf": "model.gguf", "systems": ["transformers", "vllm"]},
}


@pytest.fixture
def made(tmp_path):
    """Sections by their slug, from lines."""

    def make(*lines):
        records.write(tmp_path / "results.jsonl", [RUN, *lines])
        results = read_results(tmp_path / "results.jsonl")
        return {s.slug: s for s in sections(results, read_notes(tmp_path / "notes.md"))}

    return make


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A folder with the kept results, one more system that is absent, and notes of its own."""
    folder = tmp_path_factory.mktemp("full")
    shutil.copy(KEPT / "results.jsonl", folder)
    records.append(folder / "results.jsonl", [ABSENT])
    (folder / "notes.md").write_text("# Notes\n\n## A <loss>\n\nOne\nparagraph.\n\nAnother.\n")
    write_report(folder)
    return folder


def rows(section, part=0):
    return section.parts[part].table.rows


class Checker(html.parser.HTMLParser):
    """Collects tags that were not closed in their order, and addresses."""

    void = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.ids, self.links, self.tags = [], [], [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        named = dict(attrs)
        self.ids += [named["id"]] if "id" in named else []
        self.links += [named[name] for name in ("href", "src") if name in named]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_kept_report_is_that_of_the_kept_results(tmp_path):
    for name in ("results.jsonl", "notes.md"):
        shutil.copy(KEPT / name, tmp_path)
    for made in write_report(tmp_path):
        assert made.read_text() == (KEPT / made.name).read_text(), made.name


def test_page_is_whole_and_needs_nothing_else(full):
    text = (full / "report.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.wrong == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert {f"#{name}" for name in checker.ids} == set(checker.links)
    assert not checker.tags & {"script", "link", "img", "iframe"}
    assert "url(" not in text
    assert "@import" not in text


def test_page_has_the_sections_in_their_order(full):
    slugs = re.findall(r'<section id="(\w+)"', (full / "report.html").read_text())
    wanted = "measured headline workloads losses frontier length share modes chunk memory hits"
    wanted += " chunking stages traffic absent reproduce"
    assert slugs == wanted.split()


def test_every_drawing_is_sound_and_inside_its_frame(full):
    drawings = re.findall(r"<svg.*?</svg>", (full / "report.html").read_text(), re.S)
    assert len(drawings) > 50
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        width, height = map(float, root.get("viewBox").split()[2:])
        for mark in root.iter():
            for name, most in (("x", width), ("x1", width), ("cx", width), ("y", height)):
                assert 0 <= float(mark.get(name, 0)) <= most


def test_every_colour_of_a_drawing_is_in_the_style_sheet(full):
    style = files("kvboost.bench.report").joinpath("page.css").read_text()
    drawn = re.findall(
        r'<(?:rect|circle|polyline) class="([^"]+)"', (full / "report.html").read_text()
    )
    missing = {name for css in drawn for name in css.split() if f".{name} " not in f"{style} "}
    assert missing == set()


def test_dark_mode_gives_every_colour_anew():
    style = files("kvboost.bench.report").joinpath("page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    assert set(re.findall(r"(--[\w-]+):", light)) == set(re.findall(r"(--[\w-]+):", dark))


@pytest.mark.parametrize("mode", [0, 1])
def test_colours_stand_out_from_the_paper(mode):
    style = files("kvboost.bench.report").joinpath("page.css").read_text()
    part = style.split("@media (prefers-color-scheme: dark)")[mode]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
    for name, least in {"ink": 7, "soft": 4.5, "ours": 4.5, "vllm": 3, "transformers": 3}.items():
        assert _contrast(colours[name], colours["paper"]) >= least, name
    assert _contrast(colours["ours"], colours["ours-soft"]) >= 4.5


def _contrast(one, two):
    light, dark = sorted((_luminance(one), _luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour):
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_markdown_has_the_tables_of_the_page(full):
    page, text = (full / "report.html").read_text(), (full / "report.md").read_text()
    assert text.count("\n| --- |") == page.count("<table>")
    widths = {line.count(" | ") for line in text.splitlines() if line.startswith("| kvboost-auto")}
    assert len(widths) > 1
    assert "## Where we lose" in text
    assert "\nAll stages in ms:\n\n| workload |" in text


def test_markdown_does_not_speak_of_pictures(full):
    text = (full / "report.md").read_text()
    assert "The pictures are in report.html." in text
    assert "### Systems" not in text
    for word in ("Bars", "The dot", "strong line", "to the left", "colour", "lines cross"):
        assert word in (full / "report.html").read_text()
        assert word not in text


def test_notes_are_shown_and_escaped(full):
    text = (full / "report.html").read_text()
    assert "<h3>A &lt;loss&gt;</h3>\n<p>One paragraph.</p>\n<p>Another.</p>" in text


def test_what_was_not_measured_is_left_out(made):
    assert list(made()) == ["measured", "reproduce"]
    assert list(made(measure("vllm", 0.5))) == ["measured", "headline", "reproduce"]


def test_headline_has_times_ratios_and_quality(made):
    headline = made(measure("kvboost-auto", 0.2), measure("vllm", 0.1, top1=None))["headline"]
    assert rows(headline) == [
        ("kvboost-auto", "100 (0.20)", NONE, "98.0%", "18"),
        ("transformers", "500 (1.00)", NONE, "98.5%", NONE),
        ("vllm", "50.0 (0.10)", NONE, NONE, "18"),
    ]


def test_lost_is_a_whole_interval_above_one(made):
    lines = [
        measure("kvboost-auto", ratio, workload="code", phase=phase, low=low, high=high)
        for phase, ratio, low, high in (
            ("cold", 1.2, 1.05, 1.4),
            ("warm", 1.2, 0.95, 1.4),
            ("moved", 1.1, None, None),
        )
    ]
    lines.append(measure("vllm", 3.0, workload="code"))
    lines.append(measure("kvboost-auto", 3.0, workload="code", baseline="kvboost-exact"))
    lines.append(measure("kvboost-auto", 3.0, workload="code", baseline="transformers-again"))
    losses = made(*lines)["losses"]
    assert [outcome(m) for m in lines[:3]] == ["lost", "undecided", "undecided"]
    assert rows(losses) == [("kvboost-auto", "transformers", "1", "0", "2")]
    assert [row[5:7] for row in rows(losses, 1)] == [("1.20", "1.05 to 1.40")]
    assert [row[-1] for row in rows(losses, 2)] == ["lost", "undecided", "undecided"]
    assert losses.takeaway == "Lost are 1 of 3 comparisons of speed."


def test_few_pairs_decide_nothing(made):
    lines = [
        measure("kvboost-auto", ratio, workload="code", phase=phase, low=None, high=None, pairs=3)
        for phase, ratio in (("cold", 1.3), ("warm", 0.1))
    ]
    losses = made(*lines)["losses"]
    assert rows(losses) == [("kvboost-auto", "transformers", "0", "0", "2")]
    assert [row[5:] for row in rows(losses, 1)] == [
        ("1.30", NONE, "3", "undecided"),
        ("0.10", NONE, "3", "undecided"),
    ]


def test_worse_answers_are_listed(made):
    good = {"workload": "code", "phase": "moved", "top1": 0.985}
    lines = [
        measure("kvboost-auto", 0.2, **good | {"top1": 0.9}),
        measure("kvboost-exact", 0.2, **good, score=0.5, baseline_score=0.75),
        measure("vllm-kvboost", 0.2, **good, score=0.75, baseline_score=0.75),
    ]
    losses = made(*lines)["losses"]
    assert rows(losses, -1) == [
        ("code", "moved", "kvboost-auto", "top-1", "90.0%", "98.5%"),
        ("code", "moved", "kvboost-exact", "right facts", "50.0%", "75.0%"),
    ]


def question(name, **row):
    return {"kind": "question", "question": name} | row


def test_a_question_has_a_picture_for_each_phase_and_a_line_for_each_side(made):
    lines = [
        question("length", tokens=tokens, phase=phase, ours_ms=80, bare_ms=100, ratio=0.8)
        for phase in ("warm", "cold")
        for tokens in (64, 128)
    ]
    (part,) = made(*lines)["length"].parts
    assert [picture.title for picture in part.pictures] == ["cold", "warm"]
    assert all(">generate()<" in each.svg and ">kvboost<" in each.svg for each in part.pictures)
    assert part.table.rows[0][:5] == ("warm", "64", "80.0", "100", "0.80")


def test_what_was_not_found_is_in_the_table_and_not_drawn(made):
    lines = [
        question("memory", tokens=512, bits=bits, break_even_requests=found)
        for bits, found in ((16, 2.5), (4, None))
    ]
    (part,) = made(*lines)["memory"].parts
    assert len(part.table.rows) == 2
    assert "16 bits" in part.pictures[0].svg
    assert "4 bits" not in part.pictures[0].svg


def test_a_question_of_earlier_versions_is_a_table(made):
    lines = [
        question("chunking", strategy="fixed", found_share=0.4, ratio=None),
        question("chunking", strategy="anchors", found_share=0.9, ratio=0.3),
    ]
    (part,) = made(*lines)["chunking"].parts
    assert part.table.rows == [("fixed", "40.0%", NONE), ("anchors", "90.0%", "0.30")]
    assert not part.pictures


def test_fields_nobody_expected_are_shown(made):
    lines = [question("modes", mode="auto", ratio=0.3, colour="blue", machine={"cpu": "x"})]
    table = made(*lines)["modes"].parts[0].table
    assert table.columns == ("mode", "ratio", "colour")
    assert table.rows[0] == ("auto", "0.30", "blue")


def test_uncovered_time_is_drawn(made):
    line = {
        "kind": "stages",
        "workload": "code",
        "phase": "warm",
        "system": "kvboost-auto",
        "stages_ms": {"forward": 40.0, "lookup": 10.0},
        "total_ms": 100.0,
        "covered": 0.9,
        "least_covered": 0.85,
        "answers": 6,
    }
    section = made(line)["stages"]
    widths = re.findall(
        r'class="fill (stage-\w+)" [^>]*?width="([\d.]+)"', section.parts[0].pictures[0].svg
    )
    drawn = {name: float(width) for name, width in widths[-3:]}
    assert drawn["stage-forward"] == pytest.approx(4 * drawn["stage-rest"], rel=0.02)


def test_reproducing_names_the_command(made):
    code = made()["reproduce"].parts[0].code.splitlines()
    command = "kvboost bench run --model tiny --gguf model.gguf --dtype bf16"
    assert code[-1] == f"{command} --rounds 3 --seed 7 --systems transformers vllm --out bench"


def test_log_of_an_absent_system_is_left_out(made):
    absent = made(ABSENT)["absent"]
    assert absent.takeaway == "1 system is missing or stopped early."
    assert rows(absent) == [("vllm", "vLLM", "vllm ended")]


def test_readme_table_has_systems_as_rows(tmp_path):
    lines = [
        RUN,
        {"kind": "system", "system": "kvboost-auto", "title": "KVBoost | auto", "versions": {}},
        measure("kvboost-auto", 0.2),
        measure("kvboost-auto", 0.3, phase="moved"),
        measure("transformers-again", 1.0),
    ]
    records.write(tmp_path / "results.jsonl", lines)
    table = readme_table(tmp_path / "results.jsonl").splitlines()
    top1 = "98.0 % / 98.0 %"
    assert table[2] == rf"| KVBoost \| auto | 100 (0.20) | 150 (0.30) | {top1} |"
    assert table[3].startswith("| transformers | 500 (1.00) | 500 (1.00) |")
    assert len(table) == 4


def test_readme_sentence_is_of_the_longest_warm_prompt(tmp_path):
    asked = {"kind": "question", "question": "length", "top1": 1.0, "cached_share": 0.9, "pairs": 7}
    lines = [
        RUN,
        *(
            asked | {"tokens": n, "phase": phase, "ours_ms": n, "bare_ms": 8 * n, "ratio": 0.125}
            for n in (256, 2048)
            for phase in ("warm", "moved")
        ),
    ]
    records.write(tmp_path / "results.jsonl", lines)
    sentence = readme_sentence(tmp_path / "results.jsonl")
    assert "2,048-token prompt: first token after **2.0 s instead of 16.4 s**" in sentence
    assert "median of 7 pairs, 90% of the prompt cached" in sentence


def test_missing_results_are_named(tmp_path):
    with pytest.raises(KVBoostError, match=r"results\.jsonl is not in"):
        write_report(tmp_path)


def test_ours_come_first_and_have_their_own_colour():
    names = ["zebra", "llama-server", "vllm", "vllm-kvboost", "kvboost-public", "kvboost-auto"]
    ordered = sorted(names, key=by_system)
    assert set(ordered[:2]) == {"kvboost-auto", "vllm-kvboost"}
    assert ordered[-1] == "zebra"
    assert [name for name in names if family(name) == "ours"] == [n for n in names if n in OURS]
