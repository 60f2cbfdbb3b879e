"""Values as JSON can hold them."""

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
