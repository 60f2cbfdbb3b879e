"""Training against a plain loop over torch.nn, what is carried from window to window, and what is not repeated."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lmapp
import lmapp.run
from lmapp import checkpoint
from lmapp.config import build
from lmapp.errors import LmappError
from lmapp.models.recurrent import RecurrentModel
from lmapp.training import module as training_module
from lmapp.training import truncation
from lmapp.training.module import LanguageModule
from lmapp.training.validation import Validation
from lmapp.vocabulary import Vocabulary

ROWS, WIDTH = 4, 16
TIMED = ("seconds", "train/seconds", "train/chars_per_second")


@pytest.fixture(scope="module")
def ascii_text(real_text: str) -> str:
    """560 characters; in four rows of windows of 16 an epoch has eight steps, uneven rows and a narrow last window."""
    return "".join(c for c in real_text if c.isascii())[:560]


def settings(directory: Path, text: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A short run on `text` that logs every step."""
    path = directory / "text.txt"
    path.write_text(text, encoding="utf-8")
    return {
        "data": {
            "path": [str(path)],
            "batch_size": ROWS,
            "sequence_length": WIDTH,
            "val_fraction": 0,
            "cache_dir": str(directory / "cache"),
            **sections.get("data", {}),
        },
        "model": {"cell": "gru", "hidden_size": 16, **sections.get("model", {})},
        "train": {
            "max_steps": 20,
            "learning_rate": 0.01,
            "warmup_steps": 5,
            "precision": "fp32",
            **sections.get("train", {}),
        },
        "gradients": {"every_steps": 0, **sections.get("gradients", {})},
        "logging": {"wandb": "disabled", "every_steps": 1, **sections.get("logging", {})},
        "runs_dir": str(directory / "runs"),
    }


def run(directory: Path, text: str, name: str = "run", **sections: dict[str, Any]) -> Path:
    return lmapp.train({**settings(directory, text, **sections), "name": name}, quiet=True).path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def weights(directory: Path) -> dict[str, Tensor]:
    return checkpoint.read(directory / "checkpoints" / "last.ckpt")["state_dict"]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# The plain loop -------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    loss: float
    norm: float
    rate: float


CARRIED: dict[str, Callable[[int, int], bool]] = {
    "within an epoch": lambda step, steps_per_epoch: step % steps_per_epoch != 0,
    "always": lambda step, steps_per_epoch: step > 0,
    "never": lambda step, steps_per_epoch: False,
}


def batches(ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Every target once, in ROWS rows of the text, WIDTH columns a step; −100 where a shorter row has ended."""
    share, longer = divmod(len(ids) - 1, ROWS)
    rows, start = [], 0
    for row in range(ROWS):
        size = share + (row < longer)
        rows.append((ids[start : start + size], ids[start + 1 : start + size + 1]))
        start += size
    assert start == len(ids) - 1
    found = []
    for begin in range(0, len(rows[0][0]), WIDTH):
        width = min(WIDTH, len(rows[0][0]) - begin)
        cut = [(x[begin : begin + width], y[begin : begin + width]) for x, y in rows]
        inputs = [x + [0] * (width - len(x)) for x, _ in cut]
        targets = [y + [-100] * (width - len(y)) for _, y in cut]
        found.append((torch.tensor(inputs), torch.tensor(targets)))
    return found


def plain_loop(text: str, options: dict[str, Any], carried: str) -> list[Step]:
    """The same training, written down once more with torch.nn and nothing of Lightning."""
    config = build(options)
    model, train = config.model, config.train
    symbols = sorted(set(text))
    size, total = len(symbols), train.max_steps
    assert total is not None
    torch.manual_seed(config.seed)
    first = RecurrentModel(
        size, cell=model.cell, hidden_size=model.hidden_size, num_layers=model.num_layers, init=model.init
    )
    kind = {"gru": nn.GRU, "lstm": nn.LSTM, "vanilla": nn.RNN}[model.cell[0]]
    layers = kind(size, model.hidden_size, len(model.cells), batch_first=True)
    head = nn.Linear(model.hidden_size, size)
    assert first.head is not None
    for index, layer in enumerate(first.layers):
        for name, parameter in layer.named_parameters():
            getattr(layers, f"{name}_l{index}").data.copy_(parameter.data)
    head.load_state_dict(first.head.state_dict())
    parameters = [*layers.parameters(), *head.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, betas=(0.9, 0.99))
        if train.optimizer == "adamw"
        else torch.optim.SGD(groups, momentum=train.momentum)
    )
    pieces = batches([symbols.index(c) for c in text])
    state, steps = None, []
    for step in range(total):
        inputs, targets = pieces[step % len(pieces)]
        rate = train.learning_rate * min(
            (step + 1) / train.warmup_steps,
            0.5 * (1 + math.cos(math.pi * max(0, step - train.warmup_steps) / (total - train.warmup_steps))),
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        state = state if CARRIED[carried](step, len(pieces)) else None
        outputs, state = layers(nn.functional.one_hot(inputs, size).float(), state)
        state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        loss = nn.functional.cross_entropy(head(outputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
        for p in parameters:
            assert p.grad is not None
            if train.clip_norm is not None:
                p.grad.mul_(min(1.0, train.clip_norm / norm))
            elif train.clip_value is not None:
                p.grad.clamp_(-train.clip_value, train.clip_value)
        optimizer.step()
        steps.append(Step(float(loss.detach()), norm, rate))
    return steps


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({"cell": "gru"}, {}),
        ({"cell": "gru", "num_layers": 2}, {"clip_norm": 0.05}),
        ({"cell": "lstm"}, {"clip_norm": None}),
        ({"cell": "lstm", "num_layers": 2, "init": "torch"}, {"clip_value": 0.003}),
        ({"cell": "vanilla"}, {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.5}),
        ({"cell": "vanilla", "num_layers": 2}, {"weight_decay": 0.5}),
    ],
)
def test_every_loss_equals_that_of_a_plain_loop(
    tmp_path: Path, ascii_text: str, model: dict[str, Any], train: dict[str, Any]
) -> None:
    options = settings(tmp_path, ascii_text, model=model, train=train)
    lines = read(lmapp.train(options, quiet=True).path / "metrics.jsonl")
    wanted = plain_loop(ascii_text, options, "within an epoch")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["train/loss"] for line in lines] == pytest.approx([s.loss for s in wanted], abs=1e-6)
    assert [line["train/learning_rate"] for line in lines] == pytest.approx([s.rate for s in wanted])
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.3


@pytest.mark.parametrize("cell", ["gru", "lstm", "vanilla"])
def test_the_state_is_carried_over_windows_and_reset_at_an_epoch_s_start(
    tmp_path: Path, ascii_text: str, cell: str
) -> None:
    for carry, twin in ((True, "within an epoch"), (False, "never")):
        options = settings(tmp_path, ascii_text, model={"cell": cell}, train={"carry_state": carry})
        lines = read(lmapp.train(options, quiet=True).path / "metrics.jsonl")
        losses = [line["train/loss"] for line in lines]
        for carried in CARRIED:
            apart = max(abs(a - b.loss) for a, b in zip(losses, plain_loop(ascii_text, options, carried), strict=True))
            assert apart < 1e-6 if carried == twin else apart > 1e-4, (carry, carried)


def test_epochs_and_characters_are_counted(tmp_path: Path, ascii_text: str) -> None:
    directory = run(tmp_path, ascii_text)
    progress = checkpoint.read(directory / "checkpoints" / "last.ckpt")["lmapp"]["progress"]
    pieces = batches([0] * len(ascii_text))
    assert len(pieces) == 9
    characters = [int((targets >= 0).sum()) for _, targets in pieces]
    assert characters[-1] < characters[0]
    assert (progress["step"], progress["epoch"], progress["batch"]) == (20, 2, 2)
    assert progress["characters"] == 2 * sum(characters) + sum(characters[:2]) == 2 * 559 + 128
    assert [line["characters"] for line in read(directory / "metrics.jsonl")][8] == 559


def test_a_run_ends_at_its_epochs(tmp_path: Path, ascii_text: str) -> None:
    directory = run(tmp_path, ascii_text, train={"max_steps": None, "max_epochs": 2})
    assert [line["step"] for line in read(directory / "metrics.jsonl")] == list(range(1, 19))


def test_minutes_become_a_plan_once(tmp_path: Path, ascii_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmapp.training import module, plan

    monkeypatch.setattr(plan, "pace", lambda seconds: 0.01)
    clock = iter(i * 0.005 for i in range(10**6))  # asked twice a step: a step takes 5 ms
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    directory = run(tmp_path, ascii_text, train={"max_steps": None, "max_minutes": 1.255 / 60})
    lines = read(directory / "metrics.jsonl")
    assert lines[-1]["step"] == plan.TIMED_STEPS + 100
    rates = [line["train/learning_rate"] for line in lines]
    assert set(rates[5 : plan.TIMED_STEPS]) == {0.01}
    assert rates[plan.TIMED_STEPS] < 0.01
    assert rates[-1] < 1e-4


# The same again -------------------------------------------------------------------------------------------------------


NOISY: dict[str, Any] = {"model": {"dropout": 0.3, "num_layers": 2}, "data": {"val_fraction": 0.3}}


def test_two_runs_with_the_same_seed_are_equal_to_the_bit(tmp_path: Path, real_text: str) -> None:
    text = real_text[:4000]
    seeds = {name: {**settings(tmp_path, text, **NOISY), "name": name, "seed": s} for name, s in zip("abc", (3, 3, 4))}  # noqa: B905
    a, b, c = (lmapp.train(options, quiet=True).path for options in seeds.values())
    assert equal(weights(a), weights(b))
    assert not equal(weights(a), weights(c))
    for name in ("metrics.jsonl", "clip_events.jsonl", "samples.txt", "decay.jsonl"):
        if name == "metrics.jsonl":
            found, again = ([{k: v for k, v in x.items() if k not in TIMED} for x in read(d / name)] for d in (a, b))
            assert found == again
        else:
            assert (a / name).exists() == (b / name).exists()
            assert not (a / name).exists() or (a / name).read_bytes() == (b / name).read_bytes()


def test_measuring_validating_and_sampling_change_no_weight(tmp_path: Path, real_text: str) -> None:
    text = real_text[:4000]
    measured = {"train": {"val_every_steps": 3}, "gradients": {"every_steps": 4}}
    silent = {"train": {"val_every_steps": 0}, "gradients": {"every_steps": 0}, "logging": {"every_steps": 20}}
    a, b = (run(tmp_path, text, name, **{**NOISY, **how}) for name, how in (("a", measured), ("b", silent)))
    assert equal(weights(a), weights(b))
    losses = [line["train/loss"] for line in read(a / "metrics.jsonl") if "train/loss" in line]
    assert len(losses) == 20
    assert read(b / "metrics.jsonl")[-1]["train/loss"] == pytest.approx(sum(losses) / 20, rel=1e-6)
    random = [checkpoint.read(d / "checkpoints" / "last.ckpt")["lmapp"]["random"]["torch"] for d in (a, b)]
    assert torch.equal(*random)


# Records --------------------------------------------------------------------------------------------------------------


def test_validation_starts_records_from_the_initial_state(real_text: str) -> None:
    text = real_text[:3000]
    vocabulary = Vocabulary("".join(sorted(set(text))))
    ids, starts = vocabulary.encode(text), np.arange(0, 3000, 50)
    torch.manual_seed(0)
    model = RecurrentModel(len(vocabulary), cell="gru", hidden_size=16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    found, without = (
        Validation(ids, vocabulary, 4, 0, starts=given).figures(model)["val/loss"] for given in (starts, None)
    )
    windows = torch.from_numpy(ids.astype(np.int64)).view(-1, 50)
    with torch.no_grad():
        logits, _ = model(windows, model.initial_state(len(windows)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1)[:-1], windows.flatten()[1:]).item()
    assert found == pytest.approx(loss, rel=1e-5)
    assert without != pytest.approx(loss, rel=1e-3)


# Gradients that are not finite ----------------------------------------------------------------------------------------


class Sabotage:
    """Makes the loss of chosen steps (counted from 1) what it should not be, and remembers how each step began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, poison: dict[int, float], row: int | None = None) -> None:
        self.before: dict[int, dict[str, Tensor]] = {}
        self.states: dict[int, Tensor] = {}
        self.rows: dict[int, list[int]] = {}
        original = LanguageModule.training_step
        forward, read = RecurrentModel.forward, truncation.read
        now = {"step": 0}

        def training_step(module: LanguageModule, batch: Any, batch_idx: int) -> Tensor:
            step = now["step"] = module.progress.step + 1
            self.before[step] = {k: v.clone() for k, v in module.model.state_dict().items()}
            loss = original(module, batch, batch_idx)
            if row is None and step in poison:
                loss = loss * poison[step]
            if row is not None:
                self.rows[step] = [int(batch.inputs[row, 0]), *batch.targets[row].tolist()]
            return loss

        def watched(model: Any, inputs: Tensor, carried: truncation.Carried, *cut: Any) -> Any:
            self.states[now["step"]] = carried.states[0].h.clone()
            return read(model, inputs, carried, *cut)

        def poisoned(model: RecurrentModel, *args: Any, **kwargs: Any) -> Any:
            logits, states = forward(model, *args, **kwargs)
            if torch.is_grad_enabled() and model.training and row is not None and now["step"] in poison:
                factor = torch.ones(len(logits), 1, 1)
                factor[row] = poison[now["step"]]
                logits = logits * factor
            return logits, states

        monkeypatch.setattr(LanguageModule, "training_step", training_step)
        monkeypatch.setattr(RecurrentModel, "forward", poisoned)
        monkeypatch.setattr(training_module, "read", watched)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_gradient_that_is_not_finite_is_passed_over(
    tmp_path: Path, ascii_text: str, monkeypatch: pytest.MonkeyPatch, value: float, optimizer: str
) -> None:
    seen = Sabotage(monkeypatch, {7: value, 12: value, 13: value})
    momentum = 0.9 if optimizer == "sgd" else 0.0
    directory = run(tmp_path, ascii_text, train={"optimizer": optimizer, "weight_decay": 0.1, "momentum": momentum})
    for step in range(2, 21):
        skipped = step - 1 in (7, 12, 13)
        assert equal(seen.before[step - 1], seen.before[step]) is skipped, step
        # Nine steps make an epoch.
        assert (not seen.states[step].any()) is (skipped or step in (10, 19)), step
    events = [e for e in read(directory / "clip_events.jsonl") if e["kind"] == "nonfinite"]
    assert [e["step"] for e in events] == [7, 12, 13]
    for event in events:
        assert event["factor"] == 0
        assert event["norm"] in ("nan", "inf")
        assert event["text"] in ascii_text
        assert len(event["text"]) == WIDTH + 1
        assert (event["epoch"], event["threshold"]) == ((event["step"] - 1) // 9, 1.0)
    lines = {line["step"]: line for line in read(directory / "metrics.jsonl")}
    assert [step for step, line in lines.items() if line["gradient/nonfinite"]] == [7, 12, 13]
    assert [step for step, line in lines.items() if "train/loss" not in line] == [7, 12, 13]
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    assert (summary["state"], summary["nonfinite_events"], summary["steps"]) == ("finished", 3, 20)


def test_the_text_of_the_event_is_the_row_that_is_not_finite(
    tmp_path: Path, ascii_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Sabotage(monkeypatch, {4: math.nan}, row=2)
    directory = run(tmp_path, ascii_text)
    (event,) = [e for e in read(directory / "clip_events.jsonl") if e["kind"] == "nonfinite"]
    symbols = sorted(set(ascii_text))
    assert event["text"] == "".join(symbols[i] for i in seen.rows[4])
    assert event["loss"] == "nan"


def test_figures_of_an_interval_leave_out_what_was_not_finite(
    tmp_path: Path, ascii_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sabotage(monkeypatch, {3: math.nan, 9: math.inf})
    every = run(tmp_path, ascii_text, "every")
    Sabotage(monkeypatch, {3: math.nan, 9: math.inf})
    fifth = run(tmp_path, ascii_text, "fifth", logging={"every_steps": 5})
    single = {line["step"]: line for line in read(every / "metrics.jsonl")}
    for line in read(fifth / "metrics.jsonl"):
        steps = [single[s] for s in range(line["step"] - 4, line["step"] + 1)]
        finite = [s for s in steps if "train/loss" in s]
        assert line["gradient/nonfinite"] == 5 - len(finite)
        assert line["gradient/norm"] == pytest.approx(sum(s["gradient/norm"] for s in finite) / len(finite))
        assert line["characters"] == steps[-1]["characters"]
        assert min(s["train/loss"] for s in finite) < line["train/loss"] < max(s["train/loss"] for s in finite)
        assert line["train/perplexity"] == pytest.approx(math.exp(line["train/loss"]))


def test_too_many_in_a_row_stop_the_run_and_the_last_finite_checkpoint_stays(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Sabotage(monkeypatch, dict.fromkeys(range(12, 100), math.nan))
    options = settings(
        tmp_path,
        real_text[:4000],
        data={"val_fraction": 0.2},
        train={"max_steps": 60, "val_every_steps": 5, "max_nonfinite": 6},
    )
    with pytest.raises(LmappError) as caught:
        lmapp.train({**options, "name": "run"}, quiet=True)
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert "step 17" in message
    assert "6 gradients in a row not finite" in message
    assert "--train.learning-rate" in message
    assert len(message.splitlines()) <= 3
    directory = tmp_path / "runs" / "run"
    content = checkpoint.read(directory / "checkpoints" / "last.ckpt")
    assert content["lmapp"]["progress"]["step"] == 15
    assert equal({k.removeprefix("model."): v for k, v in content["state_dict"].items()}, seen.before[12])
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    assert (summary["state"], summary["steps"], summary["nonfinite_events"]) == ("stopped", 17, 6)


def test_as_many_as_allowed_but_not_in_a_row_do_not_stop_it(
    tmp_path: Path, ascii_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sabotage(monkeypatch, {step: math.nan for step in range(1, 20) if step % 3})
    directory = run(tmp_path, ascii_text, train={"max_nonfinite": 3})
    assert len(read(directory / "clip_events.jsonl")) >= 13
    assert read(directory / "metrics.jsonl")[-1]["step"] == 20
