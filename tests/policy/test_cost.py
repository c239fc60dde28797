import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.policy.cost import CostModel, Work


def seconds(work: Work) -> float:
    start = 0.02 if work.num_placed == 0 else 0.03
    return start + 1e-3 * work.num_rows + 1e-7 * work.num_pairs + 2e-5 * work.num_placed


FRESH = [Work.of(n, n, 0) for n in (100, 900, 2000, 3000)]
SPARSE = [Work.of(n, r, n - r) for n, r in ((300, 40), (1000, 100), (2000, 500), (3000, 300))]


def learned() -> CostModel:
    model = CostModel()
    for work in (*FRESH, *SPARSE) * 3:
        model.observe(work, seconds(work))
    return model


@pytest.mark.parametrize("work", [Work.of(1500, 1500, 0), Work.of(1500, 200, 1300)])
def test_it_predicts_what_it_has_not_seen(work: Work) -> None:
    predicted = learned().predict(work)
    assert predicted == pytest.approx(seconds(work), rel=0.15)


def test_before_anything_is_known_reuse_is_tried() -> None:
    model = CostModel()
    assert model.predict(FRESH[0]) is None
    assert model.pays(SPARSE[0], FRESH[0], 0.9)


def test_reuse_that_does_not_pay_is_left_out() -> None:
    model = learned()
    assert model.pays(Work.of(2000, 300, 1700), Work.of(2000, 2000, 0), 0.9)
    assert not model.pays(Work.of(2000, 1950, 50), Work.of(2000, 2000, 0), 0.9)


def test_a_few_placed_rows_do_not_make_placing_many_look_dear() -> None:
    model = CostModel()
    model.observe(Work.of(1000, 1000, 0), 0.70)
    for _ in range(4):
        model.observe(Work.of(110, 60, 50), 0.10)  # a start that has nothing to do with 50 rows
    assert model.pays(Work.of(1000, 180, 820), Work.of(1000, 1000, 0), 0.6)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model, work = learned(), Work.of(1500, 1500, 0)
    for each in FRESH * 20:
        model.observe(each, 3 * seconds(each))
    assert model.predict(work) == pytest.approx(3 * seconds(work), rel=0.2)


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-4, 100)), min_size=1, max_size=80))
def test_predictions_are_never_negative(seen: list[tuple[int, float]]) -> None:
    model = CostModel()
    for num_tokens, taken in seen:
        model.observe(Work.of(num_tokens, num_tokens, 0), taken)
    for num_tokens in (1, 100, 100_000):
        predicted = model.predict(Work.of(num_tokens, num_tokens, 0))
        assert predicted is not None and predicted >= 0


def test_one_thread_may_ask_while_another_learns() -> None:
    model, wrong = learned(), list[Exception]()
    is_over = threading.Event()

    def ask() -> None:
        try:
            while not is_over.is_set():
                model.predict(FRESH[0])
        except Exception as error:
            wrong.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    asking = [threading.Thread(target=ask) for _ in range(3)]
    try:
        for thread in asking:
            thread.start()
        for _ in range(1500):
            model.observe(FRESH[1], 1.0)
    finally:
        is_over.set()
        for thread in asking:
            thread.join()
        sys.setswitchinterval(interval_s)
    assert wrong == []
