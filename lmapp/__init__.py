"""lmapp: train character-level recurrent language models on any text, and see what happens to their gradients."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmapp.inference import load
    from lmapp.run import Run, train

__all__ = ["Run", "load", "train"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `lmapp --help` answers without waiting for torch.
    if name == "load":
        from lmapp.inference import load

        return load
    if name in ("Run", "train"):
        from lmapp import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
