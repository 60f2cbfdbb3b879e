"""The LSTM of some lecture notes, whose output gate lets out the memory itself."""

from __future__ import annotations

from lmapp.cells.lstm import LSTM


class LinearLSTM(LSTM):
    """As `LSTM`, but h_t = o∘c_t: there is no tanh at the output, and h is unbounded as c is."""

    squash = False
