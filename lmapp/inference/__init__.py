"""Checkpoints at work: write, score, restore and evaluate."""

from lmapp.inference.infill import Restorer
from lmapp.inference.language_model import LanguageModel
from lmapp.inference.loading import load

__all__ = ["LanguageModel", "Restorer", "load"]
