"""The norms of a run in a histogram, against the norms themselves, and the advice that is drawn from it."""

import math
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmapp.gradients.norms import ClipAdvice, NormHistogram, advice

HALF_BIN = math.sqrt(1.01) - 1 + 1e-9

finite = st.floats(0, 1e40, allow_subnormal=False)
norms = st.one_of(finite, st.floats(0.01, 10), st.sampled_from([0.0, math.inf, math.nan]))
"""As in training: of any size, most of a few, some 0, some not finite."""


def histogram(values):
    found = NormHistogram()
    for value in values:
        found.add(value)
    return found


def kept(values):
    return [value for value in values if math.isfinite(value)]


@settings(max_examples=200, deadline=None)
@given(st.lists(norms, min_size=1, max_size=60), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_quantiles_are_those_of_the_norms_within_half_a_bin(values, shares):
    found = histogram([*values, 1.0])
    raw = kept([*values, 1.0])
    for q in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0, *shares):
        assert found.quantile(q) == pytest.approx(float(np.quantile(raw, q)), rel=HALF_BIN, abs=1e-300)
        assert min(raw) <= found.quantile(q) <= max(raw) * (1 + 1e-15)
    assert found.quantile(0) == min(raw)
    assert found.quantile(1) == max(raw)


@settings(max_examples=100, deadline=None)
@given(st.lists(norms, max_size=60))
def test_what_is_counted_is_exact(values):
    found, raw = histogram(values), kept(values)
    assert found.count == len(raw)
    assert found.nonfinite == len(values) - len(raw)
    assert found.zeros == raw.count(0)
    assert found.total == pytest.approx(math.fsum(raw), rel=1e-13)
    assert found.smallest == min(raw, default=math.inf)
    assert found.largest == max(raw, default=0)
    if raw:
        assert found.mean == pytest.approx(math.fsum(raw) / len(raw), rel=1e-13)


def test_a_bin_is_one_percent_wide():
    for value in (1e-30, 0.37, 1.0, 7e5):
        within = histogram([value])
        (index,) = within.bins
        low = 1.01**index
        assert low * (1 - 1e-12) <= value < low * 1.01 * (1 + 1e-12)
        assert len(histogram([low * 1.0001, low * 1.0099]).bins) == 1
        assert len(histogram([low * 1.0001, low * 1.0101]).bins) == 2


def test_a_long_run_takes_as_much_memory_as_a_short_one():
    generator = np.random.default_rng(1)
    draws = np.exp(generator.normal(-1, 0.7, 20_000)).tolist()
    few, many = histogram(draws[:2000]), histogram(draws)
    assert many.count == 20_000
    assert len(many.bins) < 2 * len(few.bins) < 700
    assert many.quantile(0.9) == pytest.approx(np.quantile(draws, 0.9), rel=HALF_BIN)


@settings(max_examples=50, deadline=None)
@given(st.lists(norms, max_size=40), st.integers(0, 40))
def test_stored_in_the_middle_it_ends_as_the_very_same(values, cut):
    first = histogram(values[:cut])
    again = NormHistogram(**asdict(first))
    for value in values[cut:]:
        again.add(value)
    assert again == histogram(values)
    assert first == histogram(values[:cut])


def test_it_passes_through_safe_loading(tmp_path):
    found = histogram([0.0, 0.25, 0.25, 3e7, math.inf])
    torch.save({"norms": asdict(found)}, tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)
    assert NormHistogram(**loaded["norms"]) == found
    torch.save({"norms": asdict(NormHistogram())}, tmp_path / "file")
    assert NormHistogram(**torch.load(tmp_path / "file", weights_only=True)["norms"]) == NormHistogram()


def test_without_a_finite_norm_there_is_no_quantile():
    for found in (NormHistogram(), histogram([math.nan, math.inf])):
        assert found.mean is None
        assert found.percentiles() == {}
        with pytest.raises(ValueError, match="no finite norm"):
            found.quantile(0.5)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="-1"):
        NormHistogram().add(-1.0)
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="share"):
            histogram([1.0]).quantile(q)


def test_the_percentiles_of_a_run_have_their_names():
    raw = [float(x) for x in range(1, 102)]
    assert histogram(raw).percentiles() == {
        f"norm_p{p}": pytest.approx(np.percentile(raw, p), rel=HALF_BIN) for p in (50, 90, 99)
    }


# For charts


@settings(max_examples=100, deadline=None)
@given(st.lists(norms, max_size=60))
def test_a_chart_counts_every_finite_norm_between_its_edges(values):
    found = histogram(values)
    counts, edges = found.chart()
    assert len(edges) == len(counts) + 1 <= 513
    assert all(low < high for low, high in pairwise(edges))
    assert sum(counts) == found.count
    if found.bins:
        # No norm lies exactly on an edge but by rounding, so numpy's own counts are the same.
        nudged = [value * (1 + 1e-12) for value in kept(values)]
        assert counts == np.histogram(nudged, edges)[0].tolist()
        assert counts[-1] > 0
        assert counts[0] > 0


def test_bins_of_a_chart_are_of_five_percent_or_wider_where_they_would_be_too_many():
    counts, edges = histogram([0.5, 0.51, 2.0]).chart()
    assert [high / low for low, high in pairwise(edges)] == pytest.approx([1.01**5] * len(counts))
    assert len(counts) in (28, 29)  # log 4 / log 1.051
    for zero in ([], [0.0]):
        counts, edges = histogram([1e-30, 1e30, *zero]).chart()
        assert 256 < len(counts) <= 512
        assert sum(counts) == 2 + len(zero)
    assert edges[0] == 0
    assert counts[0] == 1
    assert histogram([0.0, 0.0, math.nan]).chart() == ([2], [0.0, 1.0])


# Advice


def told(values, threshold, **how):
    return advice(histogram(values), threshold, sum(value > (threshold or math.inf) for value in values), **how)


def test_advice_has_the_figures_of_the_norms():
    raw = [float(x) for x in range(1, 1002)]
    found = told(raw, 800.0)
    assert found.quantity == "norm"
    assert found.share == 201 / 1001
    assert found.mean == 501
    assert found.quantiles == {p: pytest.approx(np.percentile(raw, p), rel=HALF_BIN) for p in (10, 50, 90, 99)}
    assert found.ratio == pytest.approx(800 / 501, rel=HALF_BIN)
    assert found.suggested == pytest.approx(np.percentile(raw, 90), rel=HALF_BIN)
    assert found.sentence == "The threshold is 1.6 times the median norm, within the advised 0.5 to 10."


def test_the_average_is_of_the_norms_before_clipping():
    assert told([1.0, 1.0, 10.0], 2.0).mean == 4


def test_discarded_steps_count_among_the_steps_and_in_no_norm():
    found = told([1.0, 3.0, math.inf, math.nan], 2.0)
    assert found.mean == 2
    assert told([1.0, 3.0, math.nan, math.nan], 2.0).share == 1 / 4


def test_the_suggestion_would_have_clipped_one_in_ten():
    generator = np.random.default_rng(2)
    raw = np.exp(generator.normal(0, 0.5, 5000)).tolist()
    suggested = told(raw, None).suggested
    assert np.mean(np.array(raw) > suggested) == pytest.approx(0.1, abs=0.01)


def test_the_suggestion_stays_within_the_rule():
    often = told([1.0] * 60 + [1000.0] * 40, 1.0)  # the 90 % quantile is far above the median
    assert often.suggested == pytest.approx(10, rel=HALF_BIN)
    assert often.quantiles[90] == pytest.approx(1000, rel=HALF_BIN)


def test_a_few_that_explode_do_not_move_the_suggestion():
    norms = [0.3] * 990 + [3e5] * 10
    assert told(norms, 1.0).mean > 1000
    assert told(norms, 1.0).suggested == pytest.approx(0.3, rel=HALF_BIN)


@pytest.mark.parametrize(
    ("values", "threshold", "words"),
    [
        ([1.0, 2.0, 3.0], 0.1, ["Every gradient was clipped", "learning rate", "0.05 times", "--train.clip-norm 2.8"]),
        ([1.0] * 19 + [0.1], 0.5, ["Nearly every gradient was clipped", "learning rate"]),
        ([1.0] * 17 + [0.1] * 3, 0.5, ["within the advised", "85 % of the gradients", "lower learning rate"]),
        ([1.0] * 9 + [2.0], 1.5, ["1.5 times", "within the advised 0.5 to 10."]),
        ([1.0, 2.0, 3.0], 6.0, ["3 times the median norm", "never reached"]),
        ([1.0, 2.0, 3.0], 30.0, ["15 times", "above 10", "never reached", "Try --train.clip-norm 2.8"]),
        ([1.0] * 999 + [1000.0], 50.0, ["50 times", "above 10", "outliers only"]),
        ([1.0] * 9 + [0.1] * 2, 0.4, ["0.4 times", "below 0.5", "Try --train.clip-norm 1"]),
        (
            [0.3] * 95 + [3e5] * 5,
            1.0,
            ["3.3 times the median", "within the advised 0.5 to 10.", "longer than 3e+05, 1e+06 times", "explode"],
        ),
        ([1.0, 2.0, 3.0], None, ["Without a threshold", "Try --train.clip-norm 2.8"]),
        ([0.0, 0.0], 1.0, ["Half of the gradients or more were 0"]),
        ([math.nan], 1.0, ["No finite gradient was seen."]),
        ([], 1.0, ["No finite gradient was seen."]),
    ],
)
def test_the_sentence_says_what_was(values, threshold, words):
    sentence = told(values, threshold).sentence
    for word in words:
        assert word in sentence, sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(("threshold", "within"), [(0.49, False), (0.51, True), (9.9, True), (10.1, False)])
def test_the_rule_is_half_to_ten_times_the_median(threshold, within):
    found = told([0.1] * 40 + [1.0] * 30 + [7.0] * 30, threshold)
    assert found.ratio == pytest.approx(threshold, rel=HALF_BIN)
    assert ("Try" not in found.sentence) is within


def test_clipping_by_value_has_quantiles_of_the_largest_entries_and_no_rule():
    found = told([0.1, 0.2, 0.4], 0.3, by_value=True)
    assert found == ClipAdvice(
        quantity="largest entry",
        share=1 / 3,
        mean=pytest.approx(0.7 / 3),
        quantiles={p: pytest.approx(np.percentile([0.1, 0.2, 0.4], p), rel=HALF_BIN) for p in (10, 50, 90, 99)},
        ratio=None,
        suggested=None,
        sentence="Clipping is by value, for which there is no rule of thumb.",
    )
