"""The update rules by name, each against its equations written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmapp.config import TrainConfig
from lmapp.models.recurrent import RecurrentModel
from lmapp.training.optimizers import make_optimizer

STEPS, RATE, DECAY = 5, 0.03, 0.2

Update = Callable[[Tensor, Tensor, dict[str, Any], int, float], Tensor]


def adam(value: Tensor, gradient: Tensor, memory: dict[str, Any], step: int, decay: float) -> Tensor:
    gradient = gradient + decay * value
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * gradient
    v = memory["v"] = 0.99 * memory.get("v", 0) + 0.01 * gradient**2
    return value - RATE * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)


def adamw(value: Tensor, gradient: Tensor, memory: dict[str, Any], step: int, decay: float) -> Tensor:
    return adam(value, gradient, memory, step, 0.0) - RATE * decay * value


def rmsprop(value: Tensor, gradient: Tensor, memory: dict[str, Any], step: int, decay: float) -> Tensor:
    gradient = gradient + decay * value
    v = memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * gradient**2
    b = memory["b"] = 0.6 * memory.get("b", 0) + gradient / (v.sqrt() + 1e-8)
    return value - RATE * b


def sgd(value: Tensor, gradient: Tensor, memory: dict[str, Any], step: int, decay: float) -> Tensor:
    b = memory["b"] = 0.6 * memory.get("b", 0) + gradient + decay * value
    return value - RATE * b


@pytest.mark.parametrize(("name", "update"), [("adam", adam), ("adamw", adamw), ("rmsprop", rmsprop), ("sgd", sgd)])
def test_each_rule_follows_its_equations(name: str, update: Update) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    config = TrainConfig(optimizer=name, learning_rate=RATE, weight_decay=DECAY, momentum=0.6)  # type: ignore[arg-type]
    optimizer = make_optimizer(model, config)
    values = {key: p.detach().clone() for key, p in model.named_parameters()}
    memories: dict[str, dict[str, Any]] = {key: {} for key in values}
    for step in range(1, STEPS + 1):
        for key, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            decay = DECAY if key == "weight" else 0.0
            values[key] = update(values[key], parameter.grad, memories[key], step, decay)
        optimizer.step()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), values[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_matrices_decay_and_biases_do_not(name: str) -> None:
    model = RecurrentModel(11, cell="lstm", hidden_size=4, num_layers=2, embedding_size=3)
    optimizer = make_optimizer(model, TrainConfig(optimizer=name, weight_decay=0.3))  # type: ignore[arg-type]
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert {key: decay[p] for key, p in model.named_parameters()} == {
        key: 0.0 if "bias" in key else 0.3 for key, _ in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_a_step_without_gradients_changes_nothing(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, TrainConfig(optimizer=name, weight_decay=0.3, momentum=0.9))  # type: ignore[arg-type]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
