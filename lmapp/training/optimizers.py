"""The update rules by name."""

from __future__ import annotations

import torch
from torch import nn

from lmapp.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser that `config.optimizer` names.

    Matrices get `weight_decay`, biases none: pulling a bias to zero pulls a gate towards half open.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    rate = config.learning_rate
    match config.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=True)
        case "adam":
            return torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.99), fused=True)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=rate, alpha=0.95, momentum=config.momentum)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=config.momentum)


def moments(config: TrainConfig) -> int:
    """Numbers that the update rule keeps for each parameter."""
    match config.optimizer:
        case "adamw" | "adam":
            return 2
        case "rmsprop":
            return 2 if config.momentum else 1
        case _:
            return 1 if config.momentum else 0
