import math
import re
from xml.etree import ElementTree

import pytest

from kvboost.drawing import axes, plots
from kvboost.drawing.svg import text_width


@pytest.mark.parametrize(
    ("values", "is_log"),
    [((0.05, 1.9), True), ((50, 1900), False), ((3, 3), False), ((0, 7), False)],
)
def test_axis_holds_its_values_and_ticks(values, is_log):
    axis = axes.fitted(values, 10, 110, is_log=is_log)
    assert axis.low <= min(values)
    assert axis.high >= max(values)
    for ticks in axis.tick_choices():
        assert all(10 - 1e-6 <= axis.at(t) <= 110 + 1e-6 for t in ticks)
    assert len(axis.tick_choices()[0]) >= 3


def test_log_axis_has_equal_steps_for_equal_ratios():
    axis = axes.fitted((0.1, 10), 0, 100, is_log=True)
    assert axis.at(1) == pytest.approx(50)
    assert axis.at(math.sqrt(10)) == pytest.approx(75)


def test_labels_of_ticks_are_short():
    assert [*map(axes.label, (0.25, 10, 5000, 2.5e6, 1e8))] == [
        "0.25",
        "10",
        "5,000",
        "2.5M",
        "100M",
    ]


def test_close_values_get_a_linear_axis():
    assert not axes.fitted((0.97, 1.03), 0, 100, is_log=True).is_log


@pytest.mark.parametrize(("high", "is_said"), [(10.0, True), (1.03, False)])
def test_log_scale_is_said_where_it_is_one(high, is_said):
    rows = [plots.Bar(str(value), "ours", value, None, None, "") for value in (1.0, high)]
    drawn = plots.bars(rows, plots.Scale("ms", is_log=True), "title")
    assert ("ms (log scale)" in drawn) == is_said


def test_a_class_from_data_is_escaped():
    row = plots.Stack("row", (('stage-"x', 1.0),), "1")
    drawn = plots.stacks([row], [('"x', 'stage-"x')], plots.Scale("ms", from_zero=True), "title")
    ElementTree.fromstring(drawn)


def test_names_of_points_do_not_overlap():
    named = [plots.Point(f"no. {n}", "ours", 1 + n / 500, 98.0) for n in range(12)]
    scale = plots.Scale("ratio", is_log=True, mark=0.2)
    drawn = plots.points(named, scale, plots.Scale("top-1"), "title")
    texts = re.findall(r'class="name ours" x="([\d.]+)" y="([\d.]+)"', drawn)
    places = [(float(x), float(y)) for x, y in texts]
    assert len(places) == 12
    width = text_width("no. 1")
    for n, (x, y) in enumerate(places):
        for other_x, other_y in places[n + 1 :]:
            assert abs(x - other_x) >= width - 0.2 or abs(y - other_y) >= 11.8


def test_rows_of_a_legend_do_not_overlap():
    series = [plots.Line(f"a rather long name {n}", "ours", ((1, 1), (2, 2))) for n in range(6)]
    drawn = plots.lines(series, plots.Scale("x"), plots.Scale("y"), "title")
    keys = re.findall(r'class="key" x="([\d.]+)" y="([\d.]+)"', drawn)
    assert len(set(keys)) == 6
    assert max(float(x) for x, _ in keys) + text_width(series[0].label) <= 360
