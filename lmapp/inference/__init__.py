"""Checkpoints at work: write, score and evaluate."""

from lmapp.inference.language_model import LanguageModel, load

__all__ = ["LanguageModel", "load"]
