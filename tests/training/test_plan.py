"""The plan of a run: limits in steps, the pace, and the learning rate of each step."""

import math
from itertools import pairwise
from typing import Any

import pytest

from lmapp.config import TrainConfig
from lmapp.training import plan


def rates(total: int | None, count: int, **options: Any) -> list[float]:
    config = TrainConfig(learning_rate=0.5, **options)
    return [plan.learning_rate(config, step, total) for step in range(count)]


def test_the_rate_rises_in_equal_steps_to_its_peak() -> None:
    assert rates(None, 6, warmup_steps=4) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])


def test_the_first_update_already_moves_and_without_warm_up_at_full_rate() -> None:
    assert rates(100, 1, warmup_steps=100)[0] == pytest.approx(0.005)
    assert rates(100, 1, warmup_steps=0)[0] == 0.5


def test_the_cosine_goes_from_the_peak_to_nothing() -> None:
    found = rates(110, 115, warmup_steps=10, schedule="cosine")
    assert found[9] == found[10] == 0.5
    assert found[60] == pytest.approx(0.25)
    assert found[35] == pytest.approx(0.25 * (1 + math.cos(math.pi / 4)))
    assert 0 < found[109] == pytest.approx(0.25 * (1 - math.cos(math.pi / 100)))
    assert found[110:] == pytest.approx([0] * 5, abs=1e-15)
    assert all(a > b for a, b in pairwise(found[10:111]))


def test_a_constant_rate_stays() -> None:
    assert set(rates(50, 60, warmup_steps=0, schedule="constant")) == {0.5}
    assert set(rates(50, 60, warmup_steps=7, schedule="constant")[7:]) == {0.5}


def test_until_the_length_is_known_the_rate_stays_at_its_peak() -> None:
    assert set(rates(None, 1000, warmup_steps=10, schedule="cosine")[10:]) == {0.5}


def test_a_run_no_longer_than_its_warm_up_has_a_rate_at_every_step() -> None:
    assert rates(3, 3, warmup_steps=10) == pytest.approx([0.05, 0.1, 0.15])
    assert rates(10, 11, warmup_steps=10)[9] == 0.5


@pytest.mark.parametrize(
    ("options", "minutes", "steps"),
    [
        ({}, plan.DEFAULT_MINUTES, None),
        ({"max_minutes": 2.0}, 2.0, None),
        ({"max_steps": 30}, None, 30),
        ({"max_epochs": 3}, None, 21),
        ({"max_epochs": 3, "max_steps": 30}, None, 21),
        ({"max_epochs": 9, "max_steps": 30}, None, 30),
        ({"max_epochs": 3, "max_minutes": 1.0}, 1.0, 21),
    ],
)
def test_whatever_limit_comes_first(options: dict[str, Any], minutes: float | None, steps: int | None) -> None:
    config = TrainConfig(**options)
    assert plan.minutes(config) == minutes
    assert plan.limit_in_steps(config, steps_per_epoch=7) == steps


def test_minutes_become_the_steps_that_fit_into_what_is_left() -> None:
    assert plan.steps_in_minutes(1.0, done=50, seconds=10.0, seconds_per_step=0.125) == 450
    assert plan.steps_in_minutes(1.0, done=50, seconds=10.0, seconds_per_step=0.3) == 50 + 166
    assert plan.steps_in_minutes(1.0, done=50, seconds=59.9, seconds_per_step=0.125) == 50


def test_a_limit_that_has_passed_ends_the_run_where_it_is() -> None:
    assert plan.steps_in_minutes(1.0, done=20, seconds=75.0, seconds_per_step=0.1) == 20


def test_the_pace_forgets_the_first_steps_and_the_extremes() -> None:
    first = [9.0] * plan.UNTIMED_STEPS
    timed = [0.1, 50.0, *[0.2, 0.4] * 9]  # twenty: two fall away at either end
    assert plan.pace(first + timed) == pytest.approx((8 * 0.2 + 8 * 0.4) / 16)


def test_the_pace_of_few_steps_is_their_mean() -> None:
    assert plan.pace([1.0, 2.0, 6.0]) == pytest.approx(3.0)
    assert plan.pace([9.0] * plan.UNTIMED_STEPS + [0.5]) == pytest.approx(0.5)
