"""Restoring masked characters, and a checkpoint of an infill model at work."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lmapp
from lmapp.errors import LmappError, UsageError
from lmapp.inference import LanguageModel, Restorer
from lmapp.inference.infill import Restoration, Restored, mask_text, restore
from lmapp.models import InfillModel
from lmapp.models.evaluation import evaluate_infill
from lmapp.vocabulary import Vocabulary

ALPHABET = Vocabulary("abcdefgh")


class Following(nn.Module):
    """Each character follows the one before it in the alphabet, and precedes the one after; sure only of what it sees.

    A left neighbour is worth `left` nats, a right one `right`; it notes what it reads.
    """

    def __init__(self, vocabulary: Vocabulary, left: float = 5.0, right: float = 3.0) -> None:
        super().__init__()
        self.size, self.mask_symbol, self.left, self.right = len(vocabulary), len(vocabulary), left, right
        self.head = nn.Linear(1, 1)
        self.reads: list[list[list[int]]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        self.reads.append(tokens.tolist())
        logits = torch.zeros(*tokens.shape, self.size)
        for row, ids in enumerate(tokens.tolist()):
            for t in range(len(ids)):
                if t > 0 and ids[t - 1] != self.mask_symbol:
                    logits[row, t, (ids[t - 1] + 1) % self.size] += self.left
                if t + 1 < len(ids) and ids[t + 1] != self.mask_symbol:
                    logits[row, t, (ids[t + 1] - 1) % self.size] += self.right
        return logits


def follow(text: str, window: int = 64, **options: Any) -> Restoration:
    return restore(Following(ALPHABET), ALPHABET, text, window=window, **options)  # type: ignore[arg-type]


def small(vocabulary: Vocabulary, **options: Any) -> InfillModel:
    """An untrained network whose beliefs are far from uniform."""
    torch.manual_seed(3)
    model = InfillModel(len(vocabulary), **({"cell": "gru", "hidden_size": 12} | options))
    with torch.no_grad():
        model.head.weight.mul_(8)
    return model


def naive(model: InfillModel, vocabulary: Vocabulary, text: str, mask: str, window: int) -> Restoration:
    """The same with every place read anew before each choice, one by one; an alphabet without byte symbols."""
    ids = [model.mask_symbol if c == mask else vocabulary.characters.index(c) for c in text]
    width, found = min(window, len(ids)), {}
    while open_ := [t for t, symbol in enumerate(ids) if symbol == model.mask_symbol]:
        beliefs = {}
        for t in open_:
            first = max(0, min(t - width // 2, len(ids) - width))
            logits = model.eval()(torch.tensor([ids[first : first + width]]))[0, t - first]
            beliefs[t] = logits.double().softmax(-1).tolist()
        place = max(open_, key=lambda t: max(beliefs[t]))
        ranked = sorted(range(len(vocabulary)), key=lambda v: -beliefs[place][v])[:5]
        pairs = [(vocabulary.characters[v], beliefs[place][v]) for v in ranked]
        found[place] = Restored(place, *pairs[0], pairs[1:])
        ids[place] = ranked[0]
    return Restoration(vocabulary.decode(ids), [found[t] for t in sorted(found)])


# Which character, in which order --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "restored"),
    [
        ("ab_de", "abcde"),
        ("a___", "abcd"),  # from what was put there before
        ("___d", "abcd"),
        ("a__d_f__", "abcdefgh"),
        ("a_g", "abg"),  # the left neighbour is worth more
        ("_", "a"),
        ("_b_", "abc"),
    ],
)
def test_the_surest_place_is_filled_first_and_the_others_know_it(text: str, restored: str) -> None:
    result = follow(text)
    assert result.text == restored
    assert [place.position for place in result.places] == [i for i, c in enumerate(text) if c == "_"]
    assert "".join(place.character for place in result.places) == "".join(
        a for a, b in zip(restored, text, strict=True) if b == "_"
    )


def test_the_probability_is_that_at_the_time_of_the_choice() -> None:
    first, second = follow("a__").places
    sure = float(torch.tensor([5.0] + [0.0] * 7).softmax(0)[0])
    assert (first.probability, second.probability) == pytest.approx((sure, sure))
    assert [len(p.alternatives) for p in (first, second)] == [4, 4]
    assert all(p.probability > p.alternatives[0][1] for p in (first, second))
    both = follow("a_d").places[0]
    weights = torch.tensor([5.0, 3.0] + [0.0] * 6).softmax(0)
    assert (both.character, both.probability) == ("b", pytest.approx(float(weights[0])))
    assert both.alternatives[0] == ("c", pytest.approx(float(weights[1])))


@pytest.mark.parametrize("window", [1, 5, 8, 100])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_it_is_what_reading_every_place_anew_each_time_comes_to(window: int, share: float, real_text: str) -> None:
    text = real_text[2000:2030]
    vocabulary = Vocabulary("".join(sorted(set(text))))
    masked, mask = mask_text(text, share, seed=1)
    model = small(vocabulary)
    found, wanted = (how(model, vocabulary, masked, mask=mask, window=window) for how in (restore, naive))
    assert found.text == wanted.text
    assert len(found.places) == round(share * len(text))
    for place, other in zip(found.places, wanted.places, strict=True):
        assert (place.position, place.character) == (other.position, other.character)
        assert place.probability == pytest.approx(other.probability, rel=1e-5)
        assert [c for c, _ in place.alternatives] == [c for c, _ in other.alternatives]


def test_a_place_is_read_in_the_middle_of_a_window_and_again_only_if_something_in_it_changed() -> None:
    model = Following(ALPHABET)
    restore(model, ALPHABET, "_bcdefghabcd_fgh_", window=7)  # type: ignore[arg-type]
    windows = ["".join("abcdefgh_"[i] for i in row) for row in model.reads[0]]
    assert windows == ["_bcdefg", "bcd_fgh", "cd_fgh_"]
    # the one in the middle is the surest; of the two others only the last has read it
    assert [len(rows) for rows in model.reads] == [3, 1]


def test_a_thousand_places_are_read_in_batches() -> None:
    model = Following(ALPHABET)
    text = "ab_defgh" * 200
    assert restore(model, ALPHABET, text, window=16).text == "abcdefgh" * 200  # type: ignore[arg-type]
    assert max(len(rows) for rows in model.reads) == 64


def test_dropout_is_off_and_the_mode_restored() -> None:
    model = small(ALPHABET, dropout=0.9).train()
    results = [restore(model, ALPHABET, "a__d_f", window=64) for _ in range(2)]
    assert results[0] == results[1]
    assert model.training


# What may be asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a_c", {"mask": "ab"}, "--mask is one character, not 'ab'."),
        ("a_c", {"mask": ""}, "--mask is one character, not ''."),
        ("", {}, "no text to restore"),
        ("abc", {}, "no '_'"),
        ("a_c", {"mask": "*"}, "no '[*]'"),
        ("a_ζ", {}, "character 3, 'ζ'"),
        ("_\ud800", {}, "character 2, .* lone surrogate"),
    ],
)
def test_what_cannot_be_restored(text: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        follow(text, **options)
    assert len(str(caught.value).splitlines()) <= 3


def test_any_character_can_be_the_mask_one_of_the_alphabet_too() -> None:
    assert follow("ab?d", mask="?").text == "abcd"
    assert follow("abed", mask="e").text == "abcd"


def test_a_network_that_is_not_finite_is_an_error() -> None:
    model = small(ALPHABET)
    nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(LmappError, match="not finite"):
        restore(model, ALPHABET, "a_c", window=8)


def test_with_byte_fallback_only_whole_characters_are_put_there() -> None:
    vocabulary = Vocabulary("abcde", byte_fallback=True)
    model = small(vocabulary)
    with torch.no_grad():
        model.head.bias[len("abcde") :] = 50.0  # it would rather spell something
    watched = Following(vocabulary)
    restore(watched, vocabulary, "a_ζ€_b", window=64)  # type: ignore[arg-type]
    spelt = vocabulary.encode("ζ€").tolist()
    assert watched.reads[0][0] == [0, watched.mask_symbol, *spelt, watched.mask_symbol, 1]
    result = restore(model, vocabulary, "a_ζ€_b\U0001f600_", window=8)
    assert [place.position for place in result.places] == [1, 4, 7]
    assert {place.character for place in result.places} <= set("abcde")
    assert (result.text[0], result.text[2:4], result.text[5:7]) == ("a", "ζ€", "b\U0001f600")
    assert all(sum([p.probability, *(x for _, x in p.alternatives)]) == pytest.approx(1) for p in result.places)


def test_a_text_is_masked_as_asked() -> None:
    text = "a_b*c" * 20
    masked, mask = mask_text(text, 0.25, seed=0)
    assert mask == "#"
    assert masked.count("#") == 25
    assert all(a in ("#", b) for a, b in zip(masked, text, strict=True))
    assert mask_text(text, 0.25, seed=0) == (masked, mask) != mask_text(text, 0.25, seed=1)
    assert mask_text("_*#" + "".join(map(chr, range(0x2580, 0x2600))), 0.5, seed=0)[1] == "\u2600"


# A checkpoint ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, real_text: str) -> Path:
    """A run on text whose validation holds unseen characters, so with byte fallback."""
    directory = tmp_path_factory.mktemp("infill")
    text = "".join(c for c in real_text[:20_000] if c.isascii()) + "na\u00efve \u2192 \u00e9t\u00e9"
    (directory / "text.txt").write_text(text, encoding="utf-8")
    config = {
        "name": "infill",
        "runs_dir": str(directory / "runs"),
        "data": {
            "path": [str(directory / "text.txt")],
            "batch_size": 8,
            "sequence_length": 32,
            "cache_dir": str(directory / "cache"),
        },
        "model": {"kind": "infill", "hidden_size": 24, "mask_fraction": 0.2},
        "train": {"max_steps": 60, "val_every_steps": 20, "precision": "fp32", "warmup_steps": 5},
        "logging": {"wandb": "disabled"},
    }
    return lmapp.train(config, quiet=True).path


def test_it_loads_as_what_it_is(run: Path, tiny_run: Path) -> None:
    language = lmapp.load(run)
    assert isinstance(language, Restorer)
    assert not isinstance(language, LanguageModel)
    assert isinstance(lmapp.load(tiny_run), LanguageModel)
    assert isinstance(language.model, InfillModel)
    assert language.window == 32
    assert not language.model.training


def test_it_restores_what_its_network_restores(run: Path) -> None:
    language = lmapp.load(run)
    result = language.infill("The assert st_tement is a conv_nient way")
    expected = restore(
        language.model, language.vocabulary, "The assert st*tement is a conv*nient way", mask="*", window=32
    )
    assert result == expected == language.infill("The assert st?tement is a conv?nient way", "?")
    assert result.as_dict()["places"][0] == {
        "position": 13,
        "character": result.text[13],
        "probability": result.places[0].probability,
        "alternatives": result.places[0].alternatives,
    }
    json.dumps(result.as_dict())


def test_its_evaluation_is_the_run_s_own_figure(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {line["step"]: line["val/infill_loss"] for line in lines if "val/infill_loss" in line}
    assert list(losses) == [20, 40, 60]
    language = lmapp.load(run / "checkpoints" / "last.ckpt")
    result = language.evaluate()
    assert result.score.loss == losses[60]
    assert set(result.as_dict()) == {"text", "infill_loss", "masked_characters", "mask_fraction", "window"}
    assert (result.mask_fraction, result.window) == (0.2, 32)
    ids = language.text().ids
    vocabulary = language.vocabulary
    characters = int(vocabulary.starts_character[ids].sum())
    assert len(ids) > characters  # some take several symbols
    assert result.as_dict()["masked_characters"] == round(0.2 * characters)
    again = evaluate_infill(
        language.model,
        np.asarray(ids),
        vocabulary.starts_character,
        vocabulary.symbol_bytes,
        mask_fraction=0.2,
        window=32,
    )
    assert again.loss == pytest.approx(losses[60], rel=1e-6)


def test_it_evaluates_other_texts_and_splits(run: Path, tmp_path: Path) -> None:
    language = lmapp.load(run)
    assert language.evaluate(split="train").text == "the run's train split"
    (tmp_path / "other.txt").write_text("x = 1\n" * 50, encoding="utf-8")
    other = language.evaluate([str(tmp_path / "other.txt")], cache_dir=str(tmp_path))
    assert (other.score.characters, other.warning) == (60, None)
    own = language.evaluate([language.config.data.path[0]], cache_dir=str(tmp_path))
    assert "too good" in own.as_dict()["warning"]
    with pytest.raises(LmappError, match="nothing to restore"):
        language.evaluate(split="test")


@pytest.mark.parametrize("method", ["generate", "stream", "samples", "score", "complete"])
def test_what_reads_from_left_to_right_is_refused(run: Path, method: str) -> None:
    with pytest.raises(UsageError, match="text on both sides") as caught:
        getattr(lmapp.load(run), method)("a text")
    assert "lmapp infill" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_left_to_right_model_does_not_restore(tiny_run: Path) -> None:
    with pytest.raises(UsageError, match=r"reads from left to right.*\n.*--model\.kind infill"):
        lmapp.load(tiny_run).infill("th_")


def test_it_needs_nothing_but_the_file(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "checkpoints" / "best.ckpt", tmp_path / "model.ckpt")
    assert lmapp.load(tmp_path / "model.ckpt").infill("th_n") == lmapp.load(run).infill("th_n")
