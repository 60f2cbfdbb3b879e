"""Cells put together over an alphabet, and the one function that every evaluation figure comes from."""

from lmapp.models.recurrent import LayerGradients, RecurrentModel, detach

__all__ = ["LayerGradients", "RecurrentModel", "detach"]
