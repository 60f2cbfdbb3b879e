"""Where training cuts the gradient through time, as numbers: what each mode lets a loss look back on."""

import sys
from dataclasses import dataclass

UNLIMITED = sys.maxsize
"""Of steps looked back: all there are."""


@dataclass(frozen=True)
class Truncation:
    """Where training cuts the gradient through time.

    Attributes:
        length: τ.
        mode: "block", "full", "sliding" or "randomised", as --train.bptt has it.
        window: T, the steps of a window; under "full" those of a row's whole text.
        stride: s, of "sliding": the losses that look back together.
        keep_probability: π, of "randomised".
    """

    length: int
    mode: str = "block"
    window: int = UNLIMITED
    stride: int = 1
    keep_probability: float = 1.0

    @property
    def look_back(self) -> tuple[int, int]:
        """The fewest and the most steps that a loss looks back; all numbers between are equally frequent."""
        match self.mode:
            case "full":
                return UNLIMITED, UNLIMITED
            case "sliding":
                return self.length, self.length + self.stride - 1
            case "randomised":  # on average, as if nothing in the window were cut
                return 1, self.window
        return 1, self.length

    @property
    def masks(self) -> bool:
        """Whether gradients are cut inside a whole window, which torch.nn's kernels cannot."""
        return (self.mode == "block" and self.length < self.window) or self.keep_probability < 1

    @property
    def mean_look_back(self) -> float:
        """Steps that a loss of "randomised" looks back in the mean over a window: its offset j, or to the first cut.

        (1/T) Σ_{j=1..T} Σ_{k<j} π^k, in which π^k occurs T − k times.
        """
        return sum((1 - k / self.window) * self.keep_probability**k for k in range(self.window))
