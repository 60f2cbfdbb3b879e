"""Intervals of decay figures: against a loop over the same resamples, where they are known, and how often they hold."""

import math

import numpy as np
import pytest

from lmapp.gradients.decay import FIGURES, Decay, Figure, Interval, ProbeShape, lost_share, resamples

WINDOWS, END_POINTS, K = 6, 3, 30
SHAPE = ProbeShape(WINDOWS, 0, K, END_POINTS, 8)


def decay_of(norms, shape=SHAPE, **components):
    return Decay({("all", name): part for name, part in {"joint": norms, **components}.items()}, shape)


def noisy(rate, seed=0, *, shape=SHAPE, between=0.05, within=0.05):
    """Norms that fall geometrically, (K+1, P): windows differ in their rates, end points by noise of their own."""
    generator = np.random.default_rng(seed)
    rates = np.log(rate) + between * generator.standard_normal((shape.windows, 1)).repeat(shape.end_points, 1)
    lags = np.arange(shape.max_lag + 1)[:, None]
    pairs = shape.windows * shape.end_points
    noise = within * generator.standard_normal((shape.max_lag + 1, pairs))
    return np.exp(generator.standard_normal(pairs) + lags * rates.reshape(1, -1) + noise)


def figure_by_hand(name, R, shape):
    """A figure of one curve, (value, whether beyond K), in plain Python; None if it is not defined."""
    if name in ("half_life", "horizon"):
        level = 0.5 if name == "half_life" else 0.01
        rising = next((lag for lag, r in enumerate(R) if r > level), None)
        if rising is None:
            return None
        lag = next((lag for lag in range(rising + 1, len(R)) if R[lag] <= level), None)
        if lag is None:
            return len(R) - 1, True
        if R[lag] == 0:
            return lag, False
        return lag - 1 + math.log(R[lag - 1] / level) / math.log(R[lag - 1] / R[lag]), False
    if name == "rate":
        lags = [lag for lag, r in enumerate(R) if r > 0]
        return (math.exp(np.polyfit(lags, [math.log(R[lag]) for lag in lags], 1)[0]), False) if len(lags) > 1 else None
    if name == "lag_99":
        if sum(R) == 0:
            return None
        if R[-1] > 0.01 * max(R):
            return len(R) - 1, True
        return next(lag for lag in range(len(R)) if sum(R[: lag + 1]) >= 0.99 * sum(R)), False
    if name == "at_truncation":
        return (R[shape.truncation_length], False) if shape.truncation_length < len(R) else None
    tau = shape.truncation_length
    return (sum(sum(R[j:]) for j in range(1, tau + 1)) / tau / sum(R), False) if sum(R) else None


def curves_by_hand(decay, component):
    """R of each resample, one at a time: pairs drawn, those without a reference left out, averaged lag by lag."""
    part, joint = decay.norms["all", component], decay.norms["all", "joint"]
    reference_lag = decay.curve("all", component).reference_lag
    curves = []
    for pairs in resamples(decay.shape.windows, decay.shape.end_points):
        used = [p for p in pairs if np.isfinite(joint[:, p]).all() and joint[reference_lag, p] > 0]
        R = []
        for lag in range(len(joint)):
            logs = [math.log(part[lag, p] / joint[reference_lag, p]) for p in used if part[lag, p] > 0]
            R.append(math.exp(math.fsum(logs) / len(logs)) if logs else 0.0)
        if used:
            curves.append(R)
    return curves


def interval_by_hand(name, curves, shape, level):
    """The percentile interval of a figure; what is beyond K is infinite."""
    found = [figure_by_hand(name, R, shape) for R in curves]
    values = sorted(math.inf if figure[1] else figure[0] for figure in found if figure is not None)
    number = max(1, math.floor((len(values) + 1) * (1 - level) / 2 + 1e-9))
    return values[number - 1], values[-number]


def ends(interval):
    return tuple(math.inf if end.censored else end.value for end in interval)


@pytest.mark.parametrize("case", ["plain", "censored", "zeros", "left out", "component"])
def test_against_a_loop_over_the_same_resamples(case):
    norms, component = noisy(0.97 if case == "censored" else 0.8), "joint"
    decay = decay_of(norms)
    if case == "zeros":
        norms[5:, ::2] = 0
        norms[9, 1] = 0
    if case == "left out":
        norms[0, 3] = norms[4, 7] = 0
        norms[2, 10] = math.inf
        norms[:, 15:] = 0
    if case == "component":
        component, c = "c", noisy(0.8, 1)
        c[0] = 0
        decay = decay_of(np.hypot(norms, c), h=norms, c=c)
    curves = curves_by_hand(decay, component)
    for name in FIGURES:
        found = {level: ends(decay.interval(name, "all", component, level)) for level in (0.95, 0.5)}
        for level, interval in found.items():
            expected = interval_by_hand(name, curves, decay.shape, level)
            assert interval == pytest.approx(expected, rel=1e-9), name
        (low, high), (inner_low, inner_high) = found.values()
        assert low <= inner_low <= inner_high <= high
        assert found[0.95] == ends(decay.interval(name, "all", component))
        assert case != "plain" or low < decay.figure(name).value < high or name == "lag_99"


@pytest.mark.parametrize("name", FIGURES)
def test_it_collapses_where_all_pairs_are_alike(name):
    norms = np.repeat(3 * 0.8 ** np.arange(K + 1.0)[:, None], WINDOWS * END_POINTS, axis=1)
    decay = decay_of(norms)
    figure, (low, high) = decay.figure(name), decay.interval(name)
    assert [low.value, high.value] == pytest.approx([figure.value] * 2, rel=1e-12)
    assert not low.censored
    assert not high.censored


def test_resamples_beyond_the_end_censor_the_interval_s_end():
    beyond = noisy(0.99, between=0.002)
    interval = decay_of(beyond).interval("half_life")
    assert interval == (Figure(30.0, True), Figure(30.0, True))
    assert str(interval) == "> 30 to > 30"
    some = decay_of(noisy(0.977, between=0.02)).interval("half_life")
    assert not some.low.censored
    assert some.low.value < 30
    assert some.high == (30, True)
    assert str(some) == f"{some.low.value:.3g} to > 30"


def test_pairs_are_drawn_window_by_window():
    drawn = resamples(5, 4)
    assert drawn.shape == (500, 20)
    # Each block of four comes from one window, and windows and end points are all drawn equally often.
    windows = drawn.reshape(500, 5, 4) // 4
    assert (windows == windows[:, :, :1]).all()
    assert any(len(set(row)) < 5 for row in windows[:, :, 0].tolist())
    shares = np.bincount(drawn.ravel(), minlength=20) / drawn.size
    assert np.abs(shares - 1 / 20).max() < 4 * math.sqrt(1 / 20 / (500 * 5))
    assert any(len(set(row)) < 4 for row in drawn[:, :4].tolist())  # end points with replacement, too


def test_it_is_the_same_at_every_call_and_moves_no_random_state():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    norms = noisy(0.8)
    assert decay_of(norms).interval("rate") == decay_of(norms.copy()).interval("rate")
    assert np.array_equal(before, np.random.get_state()[1])
    assert np.array_equal(resamples(3, 2), resamples(3, 2))


def test_it_holds_the_true_figure_about_as_often_as_it_says():
    """Of many data sets with a known rate: 8 windows are few, so somewhat less often than 95 %; more with 40."""
    truth = 0.9
    count = 100
    for windows, least, most in ((8, 0.82, 0.97), (40, 0.90, 0.99)):
        shape = ProbeShape(windows, 0, 20, 4, 8)
        held = 0
        for seed in range(count):
            decay = decay_of(noisy(truth, 1000 + seed, shape=shape, between=0.02, within=0.3), shape)
            low, high = ends(decay.interval("rate"))
            held += low <= truth <= high
        assert least <= held / count <= most, held


def test_windows_that_differ_count_for_more_than_end_points_that_do():
    """End points of one window tell the same: repeating them must not make the interval narrow."""
    few, many = ProbeShape(8, 0, 20, 1, 8), ProbeShape(8, 0, 20, 16, 8)
    norms = noisy(0.9, shape=few, within=0.0)
    width = [high - low for low, high in [ends(decay_of(norms, few).interval("rate"))]]
    width += [high - low for low, high in [ends(decay_of(norms.repeat(16, axis=1), many).interval("rate"))]]
    assert width[1] == pytest.approx(width[0], rel=0.2)


def test_one_window_or_no_figure_has_no_interval():
    shape = ProbeShape(1, 0, 4, 3, 2)
    assert decay_of(0.5 ** np.arange(5.0)[:, None].repeat(3, 1), shape).interval("half_life") is None
    far = ProbeShape(2, 0, 4, 1, 9)
    decay = decay_of(0.5 ** np.arange(5.0)[:, None].repeat(2, 1), far)
    assert decay.figure("at_truncation") is None
    assert decay.interval("at_truncation") is None
    assert decay.interval("rate") is not None
    cut = decay_of(np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), ProbeShape(2, 0, 2, 1, 1))
    assert cut.interval("rate") is None
    assert cut.interval("half_life") == ((1, False), (1, False))


def test_summary_has_every_figure_that_is_defined_with_its_interval():
    decay = decay_of(noisy(0.8), h=noisy(0.8) / 2)
    rows = decay.summary()
    assert [row.name for row in rows] == list(FIGURES)
    curve = decay.curve()
    assert [row.figure for row in rows] == [
        curve.half_life,
        curve.horizon,
        Figure(curve.rate, False),
        curve.lag_99,
        Figure(curve.R[8], False),
        Figure(lost_share(curve.R, 8), False),
    ]
    assert [row.interval for row in rows] == [decay.interval(name) for name in FIGURES]
    assert all(isinstance(row.interval, Interval) for row in rows)
    assert "half_life" not in [row.name for row in decay.summary("all", "h")], "half the joint norm is never above it"
    assert decay.summary("all", "h")[0].figure == decay.curve("all", "h").horizon
    assert [row.name for row in decay_of(noisy(0.8), ProbeShape(WINDOWS, 0, K, END_POINTS, 99)).summary()] == [
        name for name in FIGURES if name != "at_truncation"
    ]


def test_the_quoted_half_life_s_interval_is_logged():
    decay = decay_of(noisy(0.8), h=noisy(0.8) / 2)
    scalars, interval = decay.scalars(), decay.interval("half_life")
    assert scalars["decay/half_life_low"] == interval.low.value
    assert scalars["decay/half_life_high"] == interval.high.value
    assert scalars["decay/half_life_low"] < scalars["decay/half_life"] < scalars["decay/half_life_high"]
    assert sum(name.endswith(("_low", "_high")) for name in scalars) == 2
    assert decay_of(noisy(0.99, between=0.002)).scalars()["decay/half_life_high"] == K
