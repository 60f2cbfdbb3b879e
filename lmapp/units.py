"""Losses in other units, values as JSON can hold them, numbers as people read them."""

import math
from collections.abc import Mapping
from typing import Any


def jsonable(value: Any) -> Any:
    """`value` with every number that is not finite as a text, "inf", "-inf" or "nan": JSON has no spelling for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: jsonable(inner) for key, inner in value.items()}
    return [jsonable(inner) for inner in value] if isinstance(value, list | tuple) else value


def perplexity(loss: float) -> float:
    """The perplexity e^J of a loss J in nats per character; infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def size(bytes_: int) -> str:
    """Bytes as people read them."""
    return f"{bytes_ / 2**30:,.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:,.0f} MiB"


def count(number: int, noun: str) -> str:
    """A number and what it counts: "1 row", "1,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
