import html.parser
import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvboost.bench import records
from kvboost.bench.report.losses import outcome
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
    wanted = "measured headline workloads losses frontier length share stages modes chunk chunking"
    wanted += " memory hits traffic absent noise reproduce clock"
    assert slugs == wanted.split()


def test_every_drawing_is_sound_and_inside_its_frame(full):
    drawings = re.findall(r"<svg.*?</svg>", (full / "report.html").read_text(), re.S)
    assert len(drawings) > 60
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
    assert list(made()) == ["measured", "reproduce", "clock"]
    assert list(made(measure("vllm", 0.5))) == [
        "measured",
        "headline",
        "frontier",
        "reproduce",
        "clock",
    ]


def test_headline_has_times_ratios_and_quality(made):
    headline = made(measure("kvboost-auto", 0.2), measure("vllm", 0.1, top1=None))["headline"]
    assert rows(headline) == [
        ("kvboost-auto", "100 (0.20)", NONE, "98.0%", "18"),
        ("transformers", "500 (1.00)", NONE, "98.5%", NONE),
        ("vllm", "50.0 (0.10)", NONE, NONE, "18"),
    ]
    peer = f"(best of the others: vllm, 0.10 with top-1 {NONE})"
    assert f"warm 0.20 with top-1 98.0% {peer}" in headline.takeaway


def test_generate_is_the_best_of_the_others_where_none_is_faster(made):
    lines = [measure("kvboost-auto", 0.2), measure("transformers-again", 0.9), measure("vllm", 1.1)]
    said = made(*lines)["headline"].takeaway
    assert "(best of the others: generate(), 1.00 with top-1 98.5%)" in said


def test_one_workload_is_no_range(made):
    said = made(measure("kvboost-auto", 0.2, workload="code"))["workloads"].takeaway
    assert said.endswith("generate(): warm 0.20 (code).")


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
    assert rows(losses, 1) == [("kvboost-auto", "transformers", "cold, first token", "code 1.20")]
    assert [row[5:7] for row in rows(losses, 2)] == [("1.20", "1.05 to 1.40")]
    assert losses.takeaway.startswith(
        "We lose 1 of 3 comparisons of speed and win 0, with 2 undecided. The worst: kvboost-auto"
    )


def test_few_pairs_decide_nothing(made):
    lines = [
        measure("kvboost-auto", ratio, workload="code", phase=phase, low=None, high=None, pairs=3)
        for phase, ratio in (("cold", 1.3), ("warm", 0.1))
    ]
    losses = made(*lines)["losses"]
    assert rows(losses) == [("kvboost-auto", "transformers", "0", "0", "2")]
    assert losses.parts[1].table.fold == "Slower, too few pairs to say: 1 comparison"
    assert rows(losses, 1) == [("kvboost-auto", "transformers", "cold, first token", "code 1.30")]


def test_worse_answers_are_listed(made):
    good = {"workload": "code", "phase": "moved", "top1": 0.985}
    lines = [
        measure("kvboost-auto", 0.2, **good | {"top1": 0.9}),
        measure("kvboost-exact", 0.2, **good, score=0.5, baseline_score=0.75),
        measure("vllm-kvboost", 0.2, **good, score=0.75, baseline_score=0.75),
    ]
    losses = made(*lines)["losses"]
    assert rows(losses, 1) == [
        ("kvboost-exact", "moved", "right facts", "code 50.0% (75.0%)"),
        ("kvboost-auto", "moved", "top-1", "code 90.0% (98.5%)"),
    ]
    assert losses.takeaway.endswith("Outputs are worse than generate()'s in 2 of 3 cases.")


def question(name, **row):
    return {"kind": "question", "question": name} | row


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((0.9, 1.1, 0.8), "faster than generate() from 256 tokens on"),
        ((1.2, 0.8, 1.1), "not reliably faster than generate(): only at 128 tokens"),
        ((1.2, 1.0, 1.1), "not faster than generate() at any length measured (64 to 256 tokens)"),
        ((0.9, 0.8, 0.7), "faster than generate() at every length measured (64 to 256 tokens)"),
    ],
)
def test_break_even_length_is_said(made, ratios, said):
    lines = [
        question("length", tokens=tokens, phase=phase, ours_ms=r * 100, bare_ms=100, ratio=r)
        for phase, own in (("cold", (1.13, 1.02, 0.92)), ("warm", ratios))
        for tokens, r in zip((64, 128, 256), own, strict=True)
    ]
    cost = "To the first token new text takes 0.92 to 1.13 of generate()'s time"
    assert made(*lines)["length"].takeaway == f"{cost}; warm is {said}."


def test_break_even_share_is_said(made):
    lines = [
        question("share", tokens=512, phase="moved", share=share, ratio=ratio)
        for share, ratio in ((0.5, 0.7), (0.0, 1.1), (0.125, 0.99))
    ]
    said = made(*lines)["share"].takeaway
    assert "moved at 512 tokens is faster than generate() from 12.5% on." in said


def test_default_repair_is_named(made):
    lines = [
        question("frontier", repair=repair, ratio=ratio, top1=top1)
        for repair, ratio, top1 in (("none", 0.25, 0.9), ("0.15", 0.33, 0.95), ("1.0", 0.98, 1.0))
    ]
    said = made(*lines)["frontier"].takeaway
    assert "the default repair 0.15 takes 0.33 of a full prefill's time" in said
    assert "repair none, the fastest, takes 0.25" in said
    assert "1.0" not in said


def test_storing_that_never_pays_is_said(made):
    lines = [
        question(
            "memory", tokens=512, bits=bits, break_even_requests=found, kv_bytes_per_token=1024
        )
        for bits, found in ((16, 2.5), (4, None))
    ]
    memory = made(*lines)["memory"]
    paid = "at 16 bits pays after at most 3 hits (1.0 KiB per token)"
    unpaid = "at 4 bits does not always pay (1.0 KiB per token)"
    assert memory.takeaway == f"Storing {unpaid}; {paid}."
    assert len(rows(memory)) == 2


def test_strategy_without_a_time_is_in_the_table(made):
    lines = [
        question("chunking", strategy="fixed", found_share=0.4, ratio=None, top1=None),
        question("chunking", strategy="anchors", found_share=0.9, ratio=0.3, top1=0.97),
    ]
    chunking = made(*lines)["chunking"]
    assert rows(chunking)[0] == ("fixed", "40.0%", NONE, NONE)
    assert "anchors finds the most, 90.0%" in chunking.takeaway


def test_fields_nobody_expected_are_shown(made):
    lines = [question("modes", mode="auto", ratio=0.3, colour="blue", machine={"cpu": "x"})]
    table = made(*lines)["modes"].parts[0].table
    assert table.columns == ("mode", "ratio", "colour")
    assert table.rows[0] == ("auto", "0.30", "blue")


def test_noise_is_the_baseline_against_itself(made):
    lines = [
        measure("transformers-again", 1.03),
        measure("transformers-again", 0.9, workload="code", phase="cold"),
    ]
    said = made(*lines)["noise"].takeaway
    assert "up to 3.0% over all workloads together (warm, first token) and up to 10.0%" in said
    assert "on a single workload (code, cold, first token)" in said


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
    assert "stages cover 90.0% of the wall clock, and at least 85.0%" in section.takeaway
    assert section.takeaway.startswith("Most of the time goes to forward (80.0%)")
    widths = re.findall(
        r'class="fill (stage-\w+)" [^>]*?width="([\d.]+)"', section.parts[0].pictures[0].svg
    )
    drawn = {name: float(width) for name, width in widths[-3:]}
    assert drawn["stage-forward"] == pytest.approx(4 * drawn["stage-rest"], rel=0.02)


def test_less_than_half_is_not_most(made):
    line = {"kind": "stages", "workload": "code", "phase": "warm", "system": "kvboost-auto"}
    line |= {"stages_ms": {"forward": 40.0, "decode": 35.0, "load": 25.0}, "total_ms": 100.0}
    said = made(line)["stages"].takeaway
    assert said.startswith("The largest part of the time goes to forward (40.0%)")


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
        {"kind": "system", "system": "kvboost-auto", "title": "KVBoost | auto"},
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


def test_missing_and_damaged_results_are_named(tmp_path):
    with pytest.raises(KVBoostError, match=r"results\.jsonl is not in"):
        write_report(tmp_path)
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(RUN) + '\n{"kind": ')
    with pytest.raises(KVBoostError, match="line 2 of"):
        write_report(tmp_path)
    path.write_text('{"kind": "measure", "workload": "code"}')
    with pytest.raises(KVBoostError, match="lacks fields"):
        write_report(tmp_path)


def test_ours_come_first_and_have_their_own_colour():
    names = ["zebra", "llama-server", "vllm", "vllm-kvboost", "kvboost-public", "kvboost-auto"]
    ordered = sorted(names, key=by_system)
    assert set(ordered[:2]) == {"kvboost-auto", "vllm-kvboost"}
    assert ordered[-1] == "zebra"
    assert [name for name in names if family(name) == "ours"] == [n for n in names if n in OURS]
