"""Training the models that are not recurrent: an infill model's steps and figures, and that both go on exactly."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lmapp
from lmapp import checkpoint
from lmapp.config import build
from lmapp.data.batches import Batch
from lmapp.gradients.decay import Truncation
from lmapp.models import InfillModel, WindowModel, make_model
from lmapp.models.evaluation import evaluate, evaluate_infill
from lmapp.models.infill import choose_masked
from lmapp.training.infill import InfillModule
from lmapp.training.saving import EndOfStep

TIMED = ("seconds", "train/seconds", "train/chars_per_second")
KINDS = {
    "window": {"kind": "window", "window": 5, "hidden_size": 12, "dropout": 0.2},
    "infill": {"kind": "infill", "cell": "gru", "hidden_size": 8, "num_layers": 2, "dropout": 0.2},
}


def settings(directory: Path, text: str, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    (directory / "text.txt").write_text(text, encoding="utf-8")
    return {
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": 4,
            "sequence_length": 16,
            "val_fraction": 0.3,
            "cache_dir": str(directory / "cache"),
        },
        "model": model,
        "train": {"max_steps": 20, "val_every_steps": 4, "warmup_steps": 3, "precision": "fp32", **train},
        "logging": {"wandb": "disabled", "every_steps": 1},
        "name": "run",
        "runs_dir": str(directory / "runs"),
    }


def with_alphabet(text: str) -> str:
    """The text with all its characters at its beginning, so that validation holds none that training lacks."""
    return "".join(sorted(set(text))) + text


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_step_of_infill_is_what_a_plain_loop_does(tmp_path: Path, real_text: str) -> None:
    text = with_alphabet(real_text[:2000])[:1000]
    options = settings(tmp_path, text, KINDS["infill"], clip_norm=None, schedule="constant")
    found = [line["train/infill_loss"] for line in read(lmapp.train(options, quiet=True).path / "metrics.jsonl")]
    config = build(options)
    symbols = sorted(set(text[:700]))
    ids = torch.tensor([symbols.index(c) for c in text[:700]])
    torch.manual_seed(config.seed)
    model = make_model(len(symbols), config.model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
    )
    lengths = [175, 175, 175, 174]  # 699 targets in four rows
    starts = np.cumsum([0, *lengths[:-1]])
    everything = torch.ones(len(symbols), dtype=torch.bool)
    losses = []
    for step in range(20):
        begin = step % 11 * 16
        tokens = torch.stack([ids[s + begin : s + min(begin + 16, 175)] for s in starts])
        masked = choose_masked(tokens, everything, 0.15)
        logits = model(tokens.masked_fill(masked, model.mask_symbol))
        loss = F.cross_entropy(logits[masked], tokens[masked])
        assert int(masked.sum()) == round(0.15 * tokens.numel())
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1, (step + 1) / 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found == pytest.approx(losses, abs=1e-5)


def test_an_infill_run_has_one_loss_of_its_own_name(tmp_path: Path, real_text: str) -> None:
    run = lmapp.train(settings(tmp_path, real_text[:3000], KINDS["infill"]), quiet=True)
    lines = read(run.path / "metrics.jsonl")
    names = {name for line in lines for name in line}
    assert {name for name in names if name.startswith("val/")} == {"val/infill_loss"}
    assert "train/infill_loss" in names
    assert not {"train/loss", "train/perplexity", "train/bits_per_char"} & names
    assert not (run.path / "decay.jsonl").exists()
    validated = {line["step"]: line["val/infill_loss"] for line in lines if "val/infill_loss" in line}
    assert list(validated) == [4, 8, 12, 16, 20]
    best = min(validated, key=lambda step: validated[step])
    assert run.metrics["best"] == {"step": best, "val/infill_loss": validated[best]}
    assert run.metrics["last"] == {"step": 20, "val/infill_loss": validated[20]}
    saved = checkpoint.read(run.path / "checkpoints" / "best.ckpt")["lmapp"]
    assert saved["progress"]["step"] == best
    assert saved["states"] is None
    assert saved["plan"]["kernels"] == ["table+scan", "scan"]


def test_the_best_infill_checkpoint_is_that_of_the_lowest_loss(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmapp.training import validation

    losses = iter([3.0, 2.0, 2.5, 2.0, 4.0])

    def scripted(*arguments: Any, **options: Any) -> Any:
        return evaluate_infill(*arguments, **options).__class__(next(losses), 1, 1)

    monkeypatch.setattr(validation, "evaluate_infill", scripted)
    run = lmapp.train(settings(tmp_path, real_text[:3000], KINDS["infill"]), quiet=True)
    assert run.metrics["best"]["step"] == lmapp.load(run.path).step == 8


def test_the_figures_are_those_of_the_saved_network(tmp_path: Path, real_text: str) -> None:
    """Of the text in the validation split, windows as long as those of training; a window model as any other."""
    text = with_alphabet(real_text[:2900])
    for name, model in KINDS.items():
        run = lmapp.train({**settings(tmp_path, text, model), "name": name}, quiet=True)
        language = lmapp.load(run.path / "checkpoints" / "last.ckpt")
        ids, alphabet = language.text().ids, language.vocabulary
        assert len(ids) == round(0.3 * len(text))
        if name == "window":
            assert isinstance(language.model, WindowModel)
            score = evaluate(language.model, ids, alphabet.starts_character, alphabet.symbol_bytes, batch_size=4)
            assert run.metrics["last"]["val/loss"] == score.loss
            assert run.metrics["last"]["val/perplexity"] == score.perplexity
            assert run.metrics["kernels"] == ["rows"]
        else:
            assert isinstance(language.model, InfillModel)
            score = evaluate_infill(
                language.model,
                ids,
                alphabet.starts_character,
                alphabet.symbol_bytes,
                mask_fraction=0.15,
                window=16,
                batch_size=4,
            )
            assert run.metrics["last"]["val/infill_loss"] == score.loss


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind: str, tmp_path: Path, real_text: str) -> None:
    model = {**KINDS[kind], "hidden_size": 32}
    options = settings(tmp_path, real_text[:20_000], model, max_steps=100, learning_rate=0.02, val_every_steps=50)
    options["data"] |= {"batch_size": 16, "sequence_length": 32}
    run = lmapp.train(options, quiet=True)
    figure = "val/infill_loss" if kind == "infill" else "val/loss"
    first, last = (line[figure] for line in read(run.path / "metrics.jsonl") if figure in line)
    unigram = run.metrics["unigram_bits"] * np.log(2)
    assert last < first
    assert last < unigram - 0.1


def test_a_window_in_which_no_character_begins_masks_nothing() -> None:
    starts = np.array([True, False])
    config = build({"model": {"kind": "infill", "hidden_size": 4}})
    model = make_model(2, config.model)
    module = InfillModule(model, config, Truncation(3, "block", 3), 1, {}, starts)
    tokens = torch.ones(2, 3, dtype=torch.int64)
    loss = module.training_step(Batch(tokens, tokens, 0), 0)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())


def outcome(run: Path) -> dict[str, Any]:
    """Everything a run leaves that does not depend on the clock."""
    content = checkpoint.read(run / "checkpoints" / "last.ckpt")
    progress = {k: v for k, v in content["lmapp"]["progress"].items() if "seconds" not in k and k != "since_log"}
    return {
        "weights": content["state_dict"],
        "best": checkpoint.read(run / "checkpoints" / "best.ckpt")["state_dict"],
        "states": content["lmapp"]["states"],
        "random": content["lmapp"]["random"]["torch"],
        "progress": progress,
        "metrics": [{k: v for k, v in line.items() if k not in TIMED} for line in read(run / "metrics.jsonl")],
        "samples": (run / "samples.txt").read_text(encoding="utf-8"),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(
    kind: str, tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(tmp_path, real_text[:900], KINDS[kind], val_every_steps=1)  # ten steps a pass
    run, kept = tmp_path / "runs" / "run", tmp_path / "kept"
    save = EndOfStep._save

    def save_and_keep(self: EndOfStep, trainer: Any, module: Any) -> None:
        save(self, trainer, module)
        if keeping and module.progress.step in (1, 10, 11):
            shutil.copytree(run, kept / str(module.progress.step))

    monkeypatch.setattr(EndOfStep, "_save", save_and_keep)
    keeping = True
    lmapp.train(options, quiet=True)
    keeping = False
    expected = outcome(run)
    assert (expected["states"] is None) == (kind == "infill")
    assert expected["progress"]["epoch"] == 2
    for copy in kept.iterdir():
        shutil.rmtree(run)
        shutil.copytree(copy, run)
        lmapp.train(resume="run", runs_dir=options["runs_dir"], quiet=True)
        got = outcome(run)
        for part, value in expected.items():
            assert equal(value, got[part]), f"{part}, cut after step {copy.name}"
    assert len(list(kept.iterdir())) == 3
