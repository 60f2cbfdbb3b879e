"""The score of a task's answers: records of one length, each read from the initial state.

Shapes: N ids of the text, M records of P ids, B records read at once, T time, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmapp.models.evaluation import Score, evaluating, losses


@dataclass(frozen=True)
class AnswerScore(Score):
    """Sums over the characters of answers, each of which is one byte.

    Attributes:
        correct: characters that the likeliest symbol predicts.
    """

    correct: int

    @property
    def accuracy(self) -> float:
        """Share of the answers' characters that the likeliest symbol predicts."""
        return self.correct / self.characters if self.characters else math.nan


def evaluate_answers(
    model: Any,
    ids: np.ndarray,
    scored: np.ndarray,
    *,
    batch_size: int,
    chunk: int = 256,
    share: tuple[int, int] = (0, 1),
) -> AnswerScore:
    """Read every record from the initial state and score its answer.

    Args:
        model: a `RecurrentModel`, a `WindowModel`, or whatever has their `initial_state`, `forward`, `train` and
            `training`.
        ids: (M·P,) integers.
        scored: (P,) bool, which ids of a record are its answer; not the first.
        batch_size: B.
        chunk: ids read in one call of the model.
        share: (r, w): only every w-th batch is read, from the r-th on; the scores for all r < w add up.
    """
    records = np.asarray(ids).reshape(-1, len(scored))
    device = model.initial_state(1)[0][0].device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    characters = 0
    with evaluating(model):
        for start in range(share[0] * batch_size, len(records), share[1] * batch_size):
            rows = records[start : start + batch_size].astype(np.int64)
            targets = torch.from_numpy(np.where(scored, rows, -1)[:, 1:]).to(device)
            inputs = torch.from_numpy(rows[:, :-1]).to(device)
            states = model.initial_state(len(rows))
            for begin in range(0, inputs.shape[1], chunk):
                logits, states = model(inputs[:, begin : begin + chunk], states)
                wanted = targets[:, begin : begin + chunk]
                loss_sum += losses(logits, wanted).double().sum()
                correct += (logits.argmax(-1) == wanted).sum()
            characters += len(rows) * int(scored[1:].sum())
    return AnswerScore(float(loss_sum), characters, characters, int(correct))
