"""What was done to the training text is done to prompts and other texts too; idle options are refused."""

from pathlib import Path
from typing import Any

import pytest

import lmapp
from lmapp.errors import LmappError, UsageError
from lmapp.inference import LanguageModel, Restorer


def train(text: str, name: str, **options: Any) -> LanguageModel | Restorer:
    Path("text.txt").write_bytes(text.encode())
    data = {"path": "text.txt", "batch_size": 4, "sequence_length": 16, **options.pop("data", {})}
    model = {"hidden_size": 12, **options.pop("model", {})}
    made = {
        "name": name,
        "data": data,
        "model": model,
        "train": {"max_steps": 20, "precision": "fp32"},
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled"},
    }
    return lmapp.load(lmapp.train(made, quiet=True).path)


@pytest.fixture
def shaped(real_text: str) -> LanguageModel:
    """Of small letters, line feeds and composed characters."""
    text = ("cafe\u0301 " + real_text[:3000]).replace("\n", "\r\n")
    model = train(text, "shaped", data={"lowercase": True, "newlines": "lf", "normalization": "nfc"})
    assert isinstance(model, LanguageModel)
    return model


def test_a_prompt_is_made_like_the_text(shaped: LanguageModel) -> None:
    assert not set("A\r\u0301") & set(shaped.vocabulary.characters)
    assert "é" in shaped.vocabulary.characters
    assert shaped.generate("THE\r\nCAFE\u0301", 30, seed=3) == shaped.generate("the\ncafé", 30, seed=3)
    assert shaped.score("THE\r\nCAFE\u0301").text == "the\ncafé"
    assert shaped.score("THE\r\n").log_probability == shaped.score("the\n").log_probability
    whole = shaped.generate("the", 200, seed=1)
    letter = next(sign for sign in whole[1:] if sign in "abcdefghijklmnopqrstuvwxyz")
    ended = shaped.generate("the", 200, seed=1, stop=[letter.upper()])
    assert ended == whole[: whole.index(letter)] != whole


def test_other_texts_are_made_like_the_text(shaped: LanguageModel) -> None:
    Path("plain.txt").write_text("the cat\nsat there.\n" * 20)
    Path("loud.txt").write_bytes(b"THE CAT\r\nSAT THERE.\r\n" * 20)
    Path("wide.txt").write_bytes(("The Cat\nSat There.\n" * 20).encode("utf-16-le"))
    expected = shaped.evaluate(["plain.txt"]).carried
    assert shaped.evaluate(["loud.txt"]).carried == expected
    assert shaped.evaluate(["wide.txt"], encoding="utf-16-le").carried == expected
    assert shaped.evaluate().carried.characters > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"encoding": "latin-1"}, "--data.encoding is an option of --data.path"),
        ({"column": "body"}, "--data.column is an option of --data.path"),
        ({"paths": ["plain.txt"], "split": "test"}, "--split is of the run's own text"),
        ({"split": "nothing"}, "--split is one of train, validation, test"),
    ],
)
def test_options_that_would_do_nothing(shaped: LanguageModel, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shaped.evaluate(**options)


def test_bytes_write_and_score_any_text(real_text: str) -> None:
    model = train(real_text[:2000], "bytes", data={"alphabet": "bytes"})
    assert isinstance(model, LanguageModel)
    assert len(model.vocabulary) == 256
    assert model.generate("", 10, seed=1)
    assert len(model.generate("漢字 ✓", 10, seed=1)) == 10
    assert len(model.score("Ünïcode ✓").surprisals) == len("Ünïcode ✓")
    with pytest.raises(UsageError, match="the model reads bytes as they are"):
        model.evaluate(["text.txt"], encoding="latin-1")


def test_a_mask_is_not_what_the_text_is_made_into(real_text: str) -> None:
    restorer = train(real_text[:2000], "infill", data={"lowercase": True}, model={"kind": "infill"})
    assert isinstance(restorer, Restorer)
    assert restorer.infill("heXlo", "X").places[0].position == 2
    restored = restorer.infill("hexlo X and X", "X")
    assert [place.position for place in restored.places] == [6, 12]
    assert restored.text[:5] == "hexlo"


def test_a_given_alphabet_and_what_it_lacks(real_text: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = train(real_text[:2000], "first", data={"byte_fallback": "true"})
    Path("v.json").write_text(model.vocabulary.to_json(), encoding="utf-8")
    text = real_text[:2000] + "漢字漢"
    given = {"name": "given", "data": {"path": "new.txt", "alphabet": "v.json", "batch_size": 4, "sequence_length": 16}}
    Path("new.txt").write_text(text, encoding="utf-8")
    made = {**given, "model": {"hidden_size": 12}, "train": {"max_steps": 3}, "logging": {"wandb": "disabled"}}
    run = lmapp.train(made)
    assert "3 characters (2 distinct) are without a symbol in v.json and are written as bytes." in " ".join(
        capsys.readouterr().out.split()
    )
    assert lmapp.load(run.path).vocabulary == model.vocabulary
    for content, said in (
        ("{}", "v.json: This is not a vocabulary file"),
        (None, "The vocabulary v.json cannot be read"),
    ):
        Path("v.json").unlink()
        if content is not None:
            Path("v.json").write_text(content)
        with pytest.raises(LmappError, match=said):
            lmapp.train({**made, "name": "other"}, quiet=True)
        Path("v.json").touch()


def test_a_stream_scored_again_is_warned_of(real_text: str) -> None:
    model = train(real_text[:3000], "stream", data={"streaming": True, "stream_steps": 5, "alphabet_from": 300})
    assert isinstance(model, LanguageModel)
    assert "trained on this text" in (model.evaluate(["text.txt"]).warning or "")
    assert model.evaluate(split="train").text == "the beginning of the run's stream"
