"""Samples written during training."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lmapp
from lmapp import checkpoint
from lmapp.errors import LmappError
from lmapp.inference.generation import Sampling
from lmapp.training.module import LanguageModule

HEADING = re.compile(r"^--- step (\d+)(?:, validation loss (\S+))? ---\n", re.MULTILINE)


def run(directory: Path, text: str, **sections: dict[str, Any]) -> Path:
    (directory / "text.txt").write_text(text, encoding="utf-8")
    options = {
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": 4,
            "sequence_length": 16,
            "cache_dir": str(directory / "cache"),
            **sections.get("data", {}),
        },
        "model": {"cell": "gru", "hidden_size": 16, "dropout": 0.3, **sections.get("model", {})},
        "train": {"max_steps": 25, "val_every_steps": 10, "precision": "fp32", **sections.get("train", {})},
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled"},
        "runs_dir": str(directory / "runs"),
        "seed": 5,
    }
    return lmapp.train(options, quiet=True).path


def samples(path: Path) -> list[tuple[int, str | None, str]]:
    """(step, loss as written, text) of each sample."""
    text = (path / "samples.txt").read_bytes().decode("utf-8")
    starts = list(HEADING.finditer(text))
    ends = [*(m.start() for m in starts[1:]), len(text)]
    found = []
    for match, end in zip(starts, ends, strict=True):
        body = text[match.end() : end]
        assert body.endswith("\n\n")
        found.append((int(match[1]), match[2], body[:-2]))
    return found


def test_a_sample_is_appended_at_every_validation_and_at_the_end(tmp_path: Path, real_text: str) -> None:
    path = run(tmp_path, real_text[:8000])
    found = samples(path)
    assert [step for step, _, _ in found] == [10, 20, 25]
    assert all(len(text) == 300 for _, _, text in found)
    last = checkpoint.read(path / "checkpoints" / "last.ckpt")["lmapp"]["progress"]["last"]
    assert found[-1][1] == f"{last['val/loss']:.4f}"


def test_it_is_what_the_saved_network_writes_from_the_run_s_seed(tmp_path: Path, real_text: str) -> None:
    path = run(tmp_path, real_text[:8000])
    language = lmapp.load(path / "checkpoints" / "last.ckpt")
    expected = "".join(language.stream("", 300, sampling=Sampling(temperature=0.8), seed=5))
    assert samples(path)[-1][2] == expected


def test_without_validation_there_is_a_sample_all_the_same(tmp_path: Path, real_text: str) -> None:
    path = run(tmp_path, real_text[:4000], data={"val_fraction": 0}, train={"val_every_steps": 0})
    ((step, loss, text),) = samples(path)
    assert (step, loss, len(text)) == (25, None, 300)


def test_an_alphabet_without_a_line_break_is_sampled_too(tmp_path: Path) -> None:
    ((_, _, text),) = samples(run(tmp_path, "ab" * 300, train={"val_every_steps": 0, "max_steps": 3}))
    assert len(text) == 300
    assert set(text) <= {"a", "b"}


def test_a_network_that_is_not_finite_writes_that_and_training_goes_on(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LanguageModule.on_train_batch_start
    healthy: dict[str, torch.Tensor] = {}

    def spoil(module: LanguageModule, *args: Any) -> None:
        weight = module.model.head.weight
        if module.progress.step == 9:  # spoilt for the tenth step and its sample
            healthy["weight"] = weight.detach().clone()
            weight.data[0, 0] = float("nan")
        elif module.progress.step == 10:
            weight.data.copy_(healthy["weight"])
        original(module, *args)

    monkeypatch.setattr(LanguageModule, "on_train_batch_start", spoil)
    # Nothing is saved at the tenth step: what is not finite would end the run there.
    path = run(tmp_path, real_text[:8000], data={"val_fraction": 0})
    found = samples(path)
    assert [step for step, _, _ in found] == [10, 20, 25]
    assert "not finite" in found[0][2]
    assert len(found[1][2]) == 300


def test_an_infill_sample_is_a_masked_piece_of_validation_text_and_its_restoration(
    tmp_path: Path, real_text: str
) -> None:
    text = "".join(sorted(set(real_text[:8000]))) + real_text[:8000]
    path = run(tmp_path, text, model={"kind": "infill", "mask_fraction": 0.25})
    heading = re.compile(r"^--- step (\d+), validation loss (\S+) ---\n(.*?)\n--\n(.*?)\n\n(?=---|\Z)", re.M | re.S)
    found = heading.findall((path / "samples.txt").read_bytes().decode("utf-8"))
    assert [int(step) for step, *_ in found] == [10, 20, 25]
    last = checkpoint.read(path / "checkpoints" / "last.ckpt")["lmapp"]["progress"]["last"]
    assert found[-1][1] == f"{last['val/infill_loss']:.4f}"
    language = lmapp.load(path / "checkpoints" / "last.ckpt")
    original = language.vocabulary.decode(language.text().ids[:200])
    (mask,) = {masked[i] for _, _, masked, _ in found for i in range(200) if masked[i] != original[i]}
    for _, _, masked, restored in found:
        assert masked == found[0][2]
        assert len(masked) == len(restored) == 200
        assert masked.count(mask) == 50
        for was, shown, now in zip(original, masked, restored, strict=True):
            assert shown == mask or was == shown == now
    assert found[-1][3] == language.infill(found[-1][2], mask).text


def test_infill_samples_without_validation_and_of_a_network_that_is_not_finite(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmapp.inference import infill

    beliefs = infill._beliefs
    monkeypatch.setattr(infill, "_beliefs", lambda model, *rest: beliefs(model, *rest) if calls.pop() else fail())
    calls = [True] * 1000 + [False]

    def fail() -> None:
        raise LmappError("The network's output is not finite.")

    path = run(tmp_path, real_text[:3000], model={"kind": "infill"}, data={"val_fraction": 0})
    text = (path / "samples.txt").read_text(encoding="utf-8")
    assert "--- step 10 ---\n(The network's output is not finite.)\n" in text
    assert real_text[:3] in text.split("--- step 20 ---")[1]
