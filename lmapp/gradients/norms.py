"""The gradient norms of all steps of a run, kept in few numbers, and what they say about the threshold of clipping.

A threshold between 0.5 and 10 times the average norm, the average taken of the norms as they are before clipping:
Pascanu, Mikolov & Bengio 2013 (arXiv:1211.5063), section 3.2. The average here is the median: where gradients explode,
which is what clipping is for, a few of them are all of the mean (an IRNN at a high rate: median 0.3, mean 5,700).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

_BIN = math.log1p(0.01)
"""Width of a bin on the scale of natural logarithms: 1 %."""
_WIDER, _MOST = 5, 512
"""Of a chart: bins that make one, of about 5 %, and how many there are at most, for W&B shows no more."""

PERCENTILES = (10, 50, 90, 99)
LOWEST, HIGHEST = 0.5, 10.0
"""Times the usual norm: the range that Pascanu et al. advise."""
OFTEN = 0.25
"""Share of steps from which on clipping is worth a second look."""
EXPLODING = 100.0
"""Times the median: where the largest hundredth of the norms is beyond, gradients explode."""
NEARLY_ALWAYS = 0.9
"""Share of steps from which on clipping sets the length of the steps rather than limits it."""


@dataclass
class NormHistogram:
    """Norms counted in bins of 1 %: bin i holds those from 1.01^i up to 1.01^(i+1).

    It takes as much memory as there are bins in use, some hundreds, however long the run is. `dataclasses.asdict` makes
    plain numbers and a dict of it, and `NormHistogram(**these)` the same histogram again.

    Attributes:
        bins: how many norms are in bin i, by i; none for empty bins.
        zeros: how many are 0, which is in no bin.
        nonfinite: how many are infinite or NaN; they count in nothing else.
        total: sum of the finite norms.
        smallest: of the finite norms; infinite if there is none.
        largest: of the finite norms; 0 if there is none.
    """

    bins: dict[int, int] = field(default_factory=dict)
    zeros: int = 0
    nonfinite: int = 0
    total: float = 0.0
    smallest: float = math.inf
    largest: float = 0.0

    @property
    def count(self) -> int:
        """How many finite norms there are."""
        return self.zeros + sum(self.bins.values())

    @property
    def mean(self) -> float | None:
        """Of the finite norms, without the bins' error; None if there is none."""
        return self.total / self.count if self.count else None

    def add(self, norm: float) -> None:
        """Count one more norm.

        Raises:
            ValueError: it is negative.
        """
        if norm < 0:
            raise ValueError(f"a norm cannot be {norm}")
        if not math.isfinite(norm):
            self.nonfinite += 1
            return
        if norm == 0:
            self.zeros += 1
        else:
            index = math.floor(math.log(norm) / _BIN)
            self.bins[index] = self.bins.get(index, 0) + 1
        self.total += norm
        self.smallest, self.largest = min(self.smallest, norm), max(self.largest, norm)

    def quantile(self, q: float) -> float:
        """The norm that a share q of all finite ones is not above, as `numpy.quantile` has it by default.

        Between two norms it is interpolated linearly; each is taken for the middle of its bin, within the smallest and
        the largest norm, so that it is right within half a bin, 0.5 %.

        Raises:
            ValueError: q is not a share, or there is no finite norm.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is of a share from 0 to 1, not {q}")
        if not self.count:
            raise ValueError("there is no finite norm")
        position = q * (self.count - 1)
        below = math.floor(position)
        low, high = self._ranked(below), self._ranked(math.ceil(position))
        return low + (position - below) * (high - low)

    def _ranked(self, rank: int) -> float:
        """The norm that so many others are below."""
        if rank == self.count - 1:
            return self.largest
        if rank == 0:
            return self.smallest
        if rank < self.zeros:
            return 0.0
        seen = self.zeros
        for index in sorted(self.bins):
            seen += self.bins[index]
            if rank < seen:
                return min(max(math.exp((index + 0.5) * _BIN), self.smallest), self.largest)
        raise AssertionError("a rank below the count is in a bin")

    def percentiles(self) -> dict[str, float]:
        """Those that a run logs, by name: norm_p50, norm_p90, norm_p99; nothing if there is no finite norm."""
        return {f"norm_p{p}": self.quantile(p / 100) for p in PERCENTILES if p >= 50} if self.count else {}

    def chart(self) -> tuple[list[int], list[float]]:
        """Counts of n ≤ 512 bins and their n+1 edges, as `numpy.histogram` gives them.

        The bins are of 5 %, wider where these would be too many; empty ones between are there. If a norm is 0 the first
        bin begins at 0 and holds nothing else.
        """
        if not self.bins:
            return [self.zeros], [0.0, 1.0]
        least, last, wide = min(self.bins), max(self.bins), _WIDER
        while last // wide - least // wide + 1 + (self.zeros > 0) > _MOST:
            wide += 1
        first = least // wide
        counts = [0] * (last // wide - first + 1)
        for index, number in self.bins.items():
            counts[index // wide - first] += number
        edges = [math.exp((first + i) * wide * _BIN) for i in range(len(counts) + 1)]
        return ([self.zeros, *counts], [0.0, *edges]) if self.zeros else (counts, edges)


@dataclass(frozen=True)
class ClipAdvice:
    """What the norms of a run say about its threshold θ.

    Attributes:
        quantity: what the norms are: under clipping by value each is the gradient's largest absolute entry.
        share: of the steps, those whose gradient was clipped.
        mean: of the finite norms before clipping; None if there is none.
        quantiles: of the same norms, by percentage (`PERCENTILES`); empty if there is none.
        ratio: θ divided by the median; None where either is missing, the median is 0 or clipping is by value.
        suggested: a threshold by the norms seen; None where there is no median above 0 or clipping is by value.
        sentence: all of it in plain words.
    """

    quantity: Literal["norm", "largest entry"]
    share: float
    mean: float | None
    quantiles: dict[int, float]
    ratio: float | None
    suggested: float | None
    sentence: str


def advice(norms: NormHistogram, threshold: float | None, clipped_steps: int, *, by_value: bool = False) -> ClipAdvice:
    """What to think of a threshold, by the norms seen before clipping (Pascanu et al. 2013).

    The suggested threshold is the norms' 90 % quantile, but at most 10 times their median: of the gradients seen it
    would have clipped about one in ten, or more where that quantile is further above. A rule of thumb: with another
    threshold the run would have seen other gradients.

    Args:
        norms: of all steps, before clipping.
        threshold: θ; None without clipping.
        clipped_steps: how many gradients were clipped.
        by_value: whether single entries are clipped, of which `norms` are the largest; then there is no rule.
    """
    steps = norms.count + norms.nonfinite
    share = clipped_steps / steps if steps else 0.0
    quantiles = {p: norms.quantile(p / 100) for p in PERCENTILES} if norms.count else {}
    mean = norms.mean
    ratio = suggested = None
    if by_value:
        sentence = "Clipping is by value, for which there is no rule of thumb."
    elif not norms.count:
        sentence = "No finite gradient was seen."
    elif not (usual := quantiles[50]):
        sentence = "Half of the gradients or more were 0: there is nothing to say about the threshold."
    else:
        suggested = min(quantiles[90], HIGHEST * usual)
        ratio = None if threshold is None else threshold / usual
        sentence = _sentence(ratio, share, suggested)
        if quantiles[99] > EXPLODING * usual:
            sentence += (
                f" One gradient in a hundred was longer than {quantiles[99]:.2g}, {quantiles[99] / usual:.2g} times "
                "the median: they explode, which is what clipping is for."
            )
    quantity: Literal["norm", "largest entry"] = "largest entry" if by_value else "norm"
    return ClipAdvice(quantity, share, mean, quantiles, ratio, suggested, sentence)


def _sentence(ratio: float | None, share: float, suggested: float) -> str:
    way = f"--train.clip-norm {suggested:.3g}"
    if ratio is None:
        return f"Without a threshold nothing is clipped. Try {way}."
    times = f"{ratio:.2g} times the median norm"
    if share >= NEARLY_ALWAYS:
        every = "Every gradient" if share == 1 else "Nearly every gradient"
        return (
            f"{every} was clipped, to {times}: the threshold sets the length of the steps, as the learning rate does. "
            f"Try {way}."
        )
    if ratio > HIGHEST:
        seldom = "was never reached" if share == 0 else "limits outliers only"
        return f"The threshold is {times}, above {HIGHEST:g}, and {seldom}. Try {way}."
    if ratio < LOWEST:
        return f"The threshold is {times}, below {LOWEST:g}. Try {way}."
    if share == 0:
        return f"The threshold is {times} and was never reached: a guard against what did not happen."
    within = f"The threshold is {times}, within the advised {LOWEST:g} to {HIGHEST:g}"
    if share >= OFTEN:
        return f"{within}, yet {100 * share:.0f} % of the gradients were clipped: a lower learning rate may do better."
    return f"{within}."
