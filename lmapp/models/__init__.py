"""Networks over an alphabet, put together from cells, and the functions that every evaluation figure comes from."""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

from lmapp.config import ModelConfig
from lmapp.models.infill import InfillModel
from lmapp.models.recurrent import Gradients, LayerGradients, RecurrentModel, detach
from lmapp.models.window import WindowModel

__all__ = [
    "Gradients",
    "InfillModel",
    "LanguageNetwork",
    "LayerGradients",
    "Network",
    "RecurrentModel",
    "WindowModel",
    "detach",
    "make_model",
]

LanguageNetwork: TypeAlias = RecurrentModel | WindowModel
"""What predicts the next character from those before it: `initial_state`, `forward`, `step`."""
Network: TypeAlias = LanguageNetwork | InfillModel


def make_model(vocabulary_size: int, config: ModelConfig) -> Network:
    """The network that a configuration describes, over an alphabet of `vocabulary_size` symbols, freshly drawn.

    Raises:
        UsageError: its options do not go together.
    """
    kinds: dict[str, Any] = {"recurrent": RecurrentModel, "window": WindowModel, "infill": InfillModel}
    kind = kinds[config.kind]
    return kind(vocabulary_size, **{name: getattr(config, name) for name in options(kind)})


def options(kind: type[Network]) -> list[str]:
    """The options of the configuration's `model` section that a kind of network reads."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
