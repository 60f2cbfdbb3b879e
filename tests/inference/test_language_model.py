"""A checkpoint at work: what it loads from, what a text scores, and that an evaluation is the run's own figure."""

import importlib
import json
import math
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmapp
from lmapp import checkpoint
from lmapp.checkpoint import CheckpointError
from lmapp.config import build
from lmapp.data import corpora
from lmapp.errors import LmappError, UsageError
from lmapp.inference import LanguageModel
from lmapp.inference.generation import Sampling, generate_samples
from lmapp.models.evaluation import evaluate, evaluate_cold
from lmapp.models.recurrent import RecurrentModel
from lmapp.vocabulary import Vocabulary


def train(directory: Path, text: str, name: str, **sections: dict[str, Any]) -> Path:
    """A short run on `text`; returns its directory."""
    path = directory / "text.txt"
    path.write_text(text, encoding="utf-8")
    config = {
        "data": {
            "path": [str(path)],
            "batch_size": 4,
            "sequence_length": 32,
            "cache_dir": str(directory / "cache"),
            **sections.get("data", {}),
        },
        "model": {"cell": "gru", "hidden_size": 16, **sections.get("model", {})},
        "train": {"max_steps": 40, "val_every_steps": 20, "precision": "fp32", **sections.get("train", {})},
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled"},
        "runs_dir": str(directory / "runs"),
        "name": name,
    }
    return lmapp.train(config, quiet=True).path


@pytest.fixture(scope="module")
def ascii_text(real_text: str) -> str:
    """30,000 characters of ASCII, every one of which occurs at the beginning."""
    text = "".join(c for c in real_text[:30_000] if c.isascii())
    return "".join(sorted(set(text))) + text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, ascii_text: str) -> Path:
    """A run without byte fallback."""
    return train(tmp_path_factory.mktemp("plain"), ascii_text, "plain", data={"byte_fallback": "false"})


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory, ascii_text: str) -> Path:
    """A run with byte fallback whose validation text holds unseen characters; two layers."""
    text = ascii_text + "na\u00efve \u2192 \U0001f600 \u00e9t\u00e9"
    return train(tmp_path_factory.mktemp("fallback"), text, "fallback", model={"cell": "lstm", "num_layers": 2})


def step_losses(model: RecurrentModel, ids: np.ndarray) -> list[float]:
    """−log softmax of every symbol but the first, one step at a time, summed by hand in float64."""
    losses = []
    states = model.initial_state(1)
    with torch.no_grad():
        for now, following in pairwise(ids):
            logits, states = model.step(torch.tensor([now]), states)
            row = [float(x) for x in logits[0]]
            largest = max(row)
            losses.append(math.log(sum(math.exp(x - largest) for x in row)) + largest - row[following])
    return losses


def val_losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


# Loading --------------------------------------------------------------------------------------------------------------


def test_a_file_a_directory_and_a_name_load_the_same(plain: Path) -> None:
    best = plain / "checkpoints" / "best.ckpt"
    texts = {
        lmapp.load(best).generate("def ", 50),
        lmapp.load(str(plain)).generate("def ", 50),
        lmapp.load("plain", runs_dir=plain.parent).generate("def ", 50),
    }
    assert len(texts) == 1
    language = lmapp.load("plain", runs_dir=str(plain.parent))
    assert language.path == best
    assert language.step == checkpoint.read(best)["lmapp"]["progress"]["best"]["step"]
    assert language.config.model.hidden_size == 16
    assert not language.model.training


def test_a_run_loads_its_best_checkpoint_and_a_file_what_it_holds(
    tmp_path: Path, ascii_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmapp.training import validation

    scores = iter([2.0, 3.0])

    def worse_and_worse(*args: Any, **kwargs: Any) -> Any:
        return evaluate(*args, **kwargs).__class__(next(scores), 1, 1)

    monkeypatch.setattr(validation, "evaluate", worse_and_worse)
    run = train(tmp_path, ascii_text, "run")
    assert (lmapp.load(run).step, lmapp.load(run / "checkpoints" / "last.ckpt").step) == (20, 40)


def test_what_is_not_there_is_named(plain: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean plain"):
        lmapp.load("plian", runs_dir=plain.parent)


def test_nothing_but_the_checkpoint_is_needed(fallback: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = lmapp.load(fallback)
    shutil.copy(fallback / "checkpoints" / "best.ckpt", tmp_path / "model.ckpt")
    monkeypatch.chdir(tmp_path)
    hidden = fallback.parent.parent.with_name("gone")
    fallback.parent.parent.rename(hidden)
    try:
        language = lmapp.load("model.ckpt")
        assert language.generate("if ", 40, seed=3) == expected.generate("if ", 40, seed=3)
        assert language.score("for x in").log_probability == expected.score("for x in").log_probability
        with pytest.raises(LmappError, match=r"--data\.path"):
            language.evaluate()
        (tmp_path / "other.txt").write_text("x = 1\n" * 50, encoding="utf-8")
        assert language.evaluate(["other.txt"], cache_dir="cache").carried.characters == 299
    finally:
        hidden.rename(fallback.parent.parent)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "model.ckpt", "other.txt"]


@pytest.mark.parametrize("damage", ["config", "vocabulary", "weights", "size", "cell"])
def test_an_incomplete_checkpoint_is_refused(plain: Path, tmp_path: Path, damage: str) -> None:
    content = checkpoint.read(plain / "checkpoints" / "best.ckpt")
    if damage in ("config", "vocabulary"):
        del content["lmapp"][damage]
    elif damage == "weights":
        del content["state_dict"]["model.head.bias"]
    elif damage == "size":
        content["lmapp"]["config"]["model"]["hidden_size"] = 17
    else:
        content["lmapp"]["config"]["model"]["cell"] = "transformer"
    path = tmp_path / "damaged.ckpt"
    checkpoint.write(path, content)
    with pytest.raises(CheckpointError, match=r"damaged\.ckpt"):
        lmapp.load(path)


def test_a_cell_from_outside_is_imported_first(
    tmp_path: Path, ascii_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outsider.py").write_text("from lmapp.cells.gru import GRU\nclass Own(GRU): pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = train(tmp_path, ascii_text, "outside", model={"cell": ["gru", "outsider:Own"]}, train={"max_steps": 2})
    expected = lmapp.load(run).generate("if ", 20, seed=3)
    monkeypatch.delitem(sys.modules, "outsider")
    with pytest.raises(CheckpointError, match=r"the code of outsider:Own is not .* add --import outsider\n"):
        lmapp.load(run)
    assert "outsider" not in sys.modules
    own = importlib.import_module("outsider")
    assert lmapp.load(run).generate("if ", 20, seed=3) == expected
    monkeypatch.delattr(own, "Own")
    with pytest.raises(CheckpointError, match=r"best\.ckpt cannot be opened: --model\.cell: there is no class 'Own'"):
        lmapp.load(run)


# Writing --------------------------------------------------------------------------------------------------------------


def test_generate_stream_and_samples_write_the_same(plain: Path) -> None:
    language = lmapp.load(plain)
    text = language.generate("class ", 60, temperature=0.7, top_k=8, stop=["\n\n"], seed=4)
    sampling = Sampling(0.7, 8)
    assert "".join(language.stream("class ", 60, sampling=sampling, stop=["\n\n"], seed=4)) == text
    assert language.samples(1, "class ", 60, sampling=sampling, stop=["\n\n"], seed=4) == [text]
    assert language.samples(3, "class ", 60, sampling=sampling, seed=4) == generate_samples(
        language.model, language.vocabulary, samples=3, prompt="class ", length=60, sampling=sampling, seed=4
    )


def test_options_out_of_range_are_refused_before_anything_is_written(plain: Path) -> None:
    language = lmapp.load(plain)
    with pytest.raises(UsageError, match="--top-p"):
        language.generate(top_p=2)
    with pytest.raises(UsageError, match="prompt's character 2"):
        language.stream("x\u00e9", sampling=Sampling())


# Scoring --------------------------------------------------------------------------------------------------------------


def test_a_text_scores_the_sum_of_its_characters(plain: Path) -> None:
    language = lmapp.load(plain)
    text = "The standard library is very extensive."
    losses = step_losses(language.model, language.vocabulary.encode(text))
    score = language.score(text)
    assert score.text == text
    assert score.log_probability == pytest.approx(-sum(losses), rel=1e-6)
    assert math.isnan(score.surprisals[0])
    assert score.surprisals[1:] == pytest.approx([loss / math.log(2) for loss in losses], rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(sum(losses) / (len(text) - 1)), rel=1e-6)


def test_a_character_of_several_symbols_has_the_sum_of_their_surprisals(fallback: Path) -> None:
    language = lmapp.load(fallback)
    text = "a\u00e9b\U0001f600\u221ac"
    ids = language.vocabulary.encode(text)
    losses = step_losses(language.model, ids)
    assert len(ids) == 12
    by_hand = [losses[0] + losses[1], losses[2], sum(losses[3:7]), sum(losses[7:10]), losses[10]]
    score = language.score(text)
    assert score.surprisals[1:] == pytest.approx([loss / math.log(2) for loss in by_hand], rel=1e-5)
    assert score.log_probability == pytest.approx(-sum(losses), rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(sum(losses) / 5), rel=1e-6)


def test_the_first_character_is_given_with_all_its_bytes(fallback: Path) -> None:
    language = lmapp.load(fallback)
    losses = step_losses(language.model, language.vocabulary.encode("\U0001f600ab"))
    score = language.score("\U0001f600ab")
    assert score.log_probability == pytest.approx(-sum(losses[3:]), rel=1e-6)
    assert score.surprisals[1:] == pytest.approx([loss / math.log(2) for loss in losses[3:]], rel=1e-5)


def test_a_score_agrees_with_an_evaluation_of_the_same_text(fallback: Path) -> None:
    language = lmapp.load(fallback)
    text = "import this  # \u00e9t\u00e9\n" * 20
    vocabulary = language.vocabulary
    starts, sizes = vocabulary.starts_character, vocabulary.symbol_bytes
    carried = evaluate(language.model, vocabulary.encode(text), starts, sizes, batch_size=4)
    assert carried.characters == len(text) - 1
    assert language.score(text).perplexity == pytest.approx(carried.perplexity, rel=1e-5)


@pytest.mark.parametrize("text", ["", "x", "\U0001f600"])
def test_a_text_too_short_to_score_is_refused(fallback: Path, text: str) -> None:
    with pytest.raises(UsageError, match="at least 2 characters"):
        lmapp.load(fallback).score(text)


def test_a_text_with_an_unknown_character_is_refused_and_not_called_a_prompt(plain: Path) -> None:
    with pytest.raises(UsageError) as caught:
        lmapp.load(plain).score("abc\u00e9")
    assert "The text's character 4" in str(caught.value)
    assert "\u00e9" in str(caught.value)


def test_a_hopeless_score_has_an_infinite_perplexity(plain: Path) -> None:
    language = lmapp.load(plain)
    with torch.no_grad():
        language.model.head.bias[language.vocabulary.encode("a")[0]] += 5000
    assert language.score("bbb").perplexity == math.inf


# Evaluating -----------------------------------------------------------------------------------------------------------


def direct(language: LanguageModel, ids: np.ndarray) -> tuple[Any, Any]:
    starts, sizes = language.vocabulary.starts_character, language.vocabulary.symbol_bytes
    carried = evaluate(language.model, ids, starts, sizes, batch_size=language.config.data.batch_size)
    return carried, evaluate_cold(language.model, ids, starts, sizes)


@pytest.mark.parametrize("run", ["plain", "fallback"])
def test_the_run_s_own_validation_text_scores_what_the_run_logged(run: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(run)
    language = lmapp.load(directory)
    result = language.evaluate()
    assert result.carried.loss == val_losses(directory)[language.step]
    assert result.carried.bits_per_byte == language.saved["progress"]["best"]["val/bits_per_byte"]
    text = language.text()
    assert result.text == text.name == "the run's validation split"
    assert (result.carried, result.cold) == direct(language, text.ids)
    assert result.warning is None
    assert result.cold.loss != result.carried.loss
    document = result.as_dict()
    assert document["loss"] == result.carried.loss
    assert document["characters"] == result.carried.characters == result.cold.characters
    assert document["cold"]["loss"] == result.cold.loss
    assert (document["cold"]["window"], document["cold"]["stride"]) == (256, 256)


def test_an_evaluation_reads_in_as_many_rows_as_the_run_did(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmapp.inference import language_model

    asked = []

    def watch(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(language_model, "evaluate", watch)
    lmapp.load(plain).evaluate()
    assert asked == [{"batch_size": 4, "starts": None}]


def test_a_run_in_bf16_scores_within_a_hundredth_of_what_it_logged(tmp_path: Path, ascii_text: str) -> None:
    run = train(tmp_path, ascii_text, "bf16", train={"precision": "bf16", "max_steps": 60, "val_every_steps": 0})
    language = lmapp.load(run)
    assert language.saved["plan"]["precision"] == "bf16"
    assert language.model.compute_dtype == torch.float32
    assert language.evaluate().carried.loss == pytest.approx(val_losses(run)[60], abs=0.01)


def test_other_files_are_scored_whole(plain: Path, tmp_path: Path, ascii_text: str) -> None:
    language = lmapp.load(plain)
    for name, part in (("a.txt", ascii_text[:700]), ("b.txt", ascii_text[700:1500])):
        (tmp_path / name).write_text(part, encoding="utf-8")
    result = language.evaluate([str(tmp_path / "a.txt")], cache_dir=str(tmp_path / "cache"))
    assert (result.carried, result.cold) == direct(language, language.vocabulary.encode(ascii_text[:700]))
    assert result.carried.characters == 699
    both = language.evaluate([str(tmp_path / "*.txt")], cache_dir=str(tmp_path / "cache"))
    assert both.carried.characters >= 1499


def test_a_character_the_model_does_not_know_is_named_with_its_place(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "foreign.txt"
    path.write_text("abc \u00e9", encoding="utf-8")
    with pytest.raises(LmappError) as caught:
        lmapp.load(plain).evaluate([str(path)], cache_dir=str(tmp_path / "cache"))
    assert "\u00e9" in str(caught.value)
    assert "foreign.txt" in str(caught.value)
    assert "--data.byte-fallback" in str(caught.value)


def test_with_byte_fallback_an_unknown_character_has_a_probability(fallback: Path, tmp_path: Path) -> None:
    path = tmp_path / "foreign.txt"
    path.write_text("abc \u4e2d\u6587", encoding="utf-8")
    result = lmapp.load(fallback).evaluate([str(path)], cache_dir=str(tmp_path / "cache"))
    assert (result.carried.characters, result.carried.bytes) == (5, 9)
    assert math.isfinite(result.carried.loss)


@pytest.mark.parametrize("text", ["", "x"])
def test_a_file_with_nothing_to_predict_is_refused(plain: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "short.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LmappError, match=r"short\.txt"):
        lmapp.load(plain).evaluate([str(path)], cache_dir=str(tmp_path / "cache"))


def test_a_run_without_validation_has_nothing_of_its_own_to_score(tmp_path: Path, ascii_text: str) -> None:
    run = train(tmp_path, ascii_text[:5000], "whole", data={"val_fraction": 0}, train={"max_steps": 3})
    with pytest.raises(LmappError, match=r"--data\.path"):
        lmapp.load(run).evaluate()


def test_one_text_at_a_time(plain: Path) -> None:
    with pytest.raises(UsageError, match=r"--data\.path and --data\.corpus"):
        lmapp.load(plain).evaluate(["text.txt"], corpus="shakespeare")


def test_a_figure_on_text_seen_in_training_carries_a_warning(
    tmp_path: Path, ascii_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {}
    for name, size in (("shakespeare", 6000), ("tiny_shakespeare", 5900)):
        files[name] = tmp_path / f"{name}.txt"
        files[name].write_text(ascii_text[:size], encoding="utf-8")
    monkeypatch.setattr(corpora, "fetch", lambda name, *_: files[name])
    run = train(tmp_path, ascii_text, "named", data={"path": [], "corpus": "tiny_shakespeare"}, train={"max_steps": 3})
    language = lmapp.load(run)
    assert language.evaluate().warning is None
    other = language.evaluate(corpus="shakespeare")
    assert other.warning is not None
    assert "shakespeare and tiny_shakespeare" in other.warning
    assert other.as_dict()["warning"] == other.warning
    assert other.text == "corpus shakespeare"
    same = language.evaluate(corpus="tiny_shakespeare").warning
    assert same is not None
    assert "trained on" in same
    assert language.evaluate([str(tmp_path / "text.txt")]).warning is None


def test_a_model_trained_on_files_of_its_own_gets_no_warning(
    plain: Path, ascii_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text(ascii_text[:3000], encoding="utf-8")
    monkeypatch.setattr(corpora, "fetch", lambda name, *_: path)
    assert lmapp.load(plain).evaluate(corpus="shakespeare", cache_dir=str(tmp_path)).warning is None


def test_a_model_can_be_put_together_from_its_parts() -> None:
    vocabulary = Vocabulary("abc")
    config = build({"model": {"cell": "vanilla", "hidden_size": 4}})
    model = RecurrentModel(3, cell="vanilla", hidden_size=4, num_layers=1).eval()
    language = LanguageModel(model, vocabulary, config, {"progress": {"step": 7}}, Path("nowhere.ckpt"))
    assert language.step == 7
    assert set(language.generate("ab", 20)) <= set("abc")
    assert len(language.score("abca").surprisals) == 4


def test_the_training_file_itself_carries_a_warning_wherever_it_lies(tmp_path: Path, ascii_text: str) -> None:
    run = train(tmp_path, ascii_text, "own", train={"max_steps": 3})
    copy = tmp_path / "copy.txt"
    copy.write_bytes((tmp_path / "text.txt").read_bytes())
    language = lmapp.load(run)
    warning = language.evaluate([str(copy)]).warning
    assert warning is not None
    assert "trained on" in warning


def test_every_split_of_the_run_can_be_scored(tmp_path: Path, ascii_text: str) -> None:
    run = train(tmp_path, ascii_text, "split", data={"test_fraction": 0.2}, train={"max_steps": 3})
    language = lmapp.load(run)
    facts = language.saved["corpus"]["facts"]
    for split in ("train", "validation", "test"):
        result = language.evaluate(split=split)
        assert result.text == f"the run's {split} split"
        assert result.carried.characters == facts[f"{split}_characters"] - 1
    with pytest.raises(UsageError, match="--split is one of train, validation, test"):
        language.evaluate(split="tset")
