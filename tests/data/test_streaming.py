"""Streams: every symbol predicted once a pass, in windows that do not care for passes, from any place again."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmapp
from lmapp.data.sources import resolve
from lmapp.data.streaming import Sample, Stream, StreamBatches
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError
from lmapp.vocabulary import Vocabulary

TEXT = "the quick brown fox\njumps over\nthe lazy dog ✓\n"
VOCABULARY = Vocabulary("".join(sorted(set(TEXT) - {"✓"})), byte_fallback=True)


class Pieces(Sample):
    """A text in pieces of one size."""

    def __init__(self, text: str, size: int, name: str = "text", *, once: bool = False) -> None:
        super().__init__(text, Reading())
        self.size_, self.name, self.once = size, name, once

    def records(self, policy: Any, column: str, reading: Any) -> Any:
        for number, row in enumerate(self.text.split("|")):
            yield self.name, number == 0, (row[i : i + self.size_] for i in range(0, len(row), self.size_))


def stream(*texts: Pieces, seed: int | None = None, separator: str = "|") -> Stream:
    return Stream(texts, policy=TextPolicy(), separator=separator, column="text", seed=seed)


def batches(read: Stream, rows: int = 3, length: int = 4, steps: int = 2, **options: Any) -> StreamBatches:
    return StreamBatches(
        read, VOCABULARY, batch_size=rows, sequence_length=length, steps=steps, **{"reset_state": False, **options}
    )


def window(loader: StreamBatches) -> list[Any]:
    return list(loader)


def symbols_of(window: list[Any]) -> list[int]:
    """What a window predicts, in the order of the text."""
    rows = torch.cat([batch.targets for batch in window], 1)
    return [int(symbol) for row in rows for symbol in row if symbol >= 0]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(("rows", "length", "steps"), [(1, 1, 1), (3, 4, 2), (2, 7, 5), (5, 20, 1), (4, 50, 3)])
def test_windows_follow_one_another_through_the_passes(size: int, rows: int, length: int, steps: int) -> None:
    loader = batches(stream(Pieces(TEXT, size)), rows, length, steps)
    assert len(loader) == steps
    found = list(itertools.chain.from_iterable(symbols_of(window(loader)) for _ in range(12)))
    whole = VOCABULARY.encode(TEXT).tolist() * (2 + len(found) // len(TEXT))
    assert found == whole[1 : 1 + len(found)]
    assert len(found) == 12 * rows * length * steps


def test_a_window_is_laid_out_in_rows_that_continue() -> None:
    first, second = window(batches(stream(Pieces(TEXT, 5))))
    assert first.inputs.shape == second.inputs.shape == (3, 4)
    assert torch.equal(first.targets[:, -1], second.inputs[:, 0])
    assert VOCABULARY.decode(first.inputs[1]) == TEXT[8:12]
    assert not first.last and not second.last and first.keep is None


@pytest.mark.parametrize("stop", range(1, 13))
def test_a_position_is_come_back_to_exactly(stop: int) -> None:
    def run(loader: StreamBatches, count: int) -> list[list[int]]:
        found: list[list[int]] = []
        while True:
            for batch in loader:
                found.append([*batch.inputs.flatten().tolist(), *batch.targets.flatten().tolist()])
                if len(found) == count:
                    return found

    read = [Pieces(TEXT, 7, "a"), Pieces(TEXT[::-1], 3, "b"), Pieces("x" + TEXT, 4, "c")]
    whole = run(batches(stream(*read, seed=4), steps=5), 26)
    before = batches(stream(*read, seed=4), steps=5)
    assert run(before, stop) == whole[:stop]
    state = json.loads(json.dumps(before.state_dict()))
    after = batches(stream(*read, seed=4), steps=5)
    after.load_state_dict(state)
    assert after.state_dict() == state
    assert run(after, 26 - stop) == whole[stop:]


def test_files_are_shuffled_anew_in_each_pass() -> None:
    read = [Pieces(sign * 6, 2, sign) for sign in "abcdefgh"]

    def order(seed: int | None, number: int) -> str:
        pieces, _ = stream(*read, seed=seed, separator="").read(number)
        return "".join(pieces)[::6]

    assert [order(None, number) for number in range(2)] == ["abcdefgh"] * 2
    passes = [order(3, number) for number in range(4)]
    assert all(sorted(one) == list("abcdefgh") for one in passes)
    assert len(set(passes)) == 4
    assert passes == [order(3, number) for number in range(4)]
    assert order(4, 0) != order(3, 0)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_records_reset_the_state(size: int) -> None:
    text = "ab ✓|cde|✓|the end"
    loader = batches(stream(Pieces(text, size), separator="\n"), 1, 50, 1, reset_state=True)
    (batch,) = window(loader)
    assert batch.keep is not None
    begins = [int(i) for i in np.flatnonzero(batch.keep[0] == 0)]
    whole = VOCABULARY.decode(batch.inputs[0].tolist())
    assert whole.startswith("ab ✓\ncde\n✓\nthe endab ✓\ncde")
    assert [VOCABULARY.decode(batch.inputs[0, i : i + 3].tolist())[:1] for i in begins[:6]] == list("ac✓tac")
    assert begins[1] == len(VOCABULARY.encode("ab ✓\n"))
    without = batches(stream(Pieces("the fox" * 9, size)), 1, 3, 1, reset_state=True)
    assert all(batch.keep is not None for batch in window(without))  # one kernel for all batches


@pytest.mark.parametrize("length", [2, 3, 23, 24, 25, 26, 47, 48, 49, 50])
@pytest.mark.parametrize("head", [0, 1, 10, 1000])
def test_what_is_read_once_ends_with_its_last_symbol(length: int, head: int) -> None:
    text = (TEXT.replace("✓", "") * 3)[:length]
    read = stream(Pieces(text, 4, once=True))
    if head:
        assert read.head(head)[0] == text[:head]
    loader, found, last = batches(read), [], []
    while not any(last):
        ended = window(loader)
        found += symbols_of(ended)
        last = [batch.last for batch in ended]
    assert last == [False] * (len(last) - 1) + [True]
    assert found == VOCABULARY.encode(text).tolist()[1:]
    with pytest.raises(LmappError, match="at its end"):
        window(loader)


def test_a_head_changes_nothing() -> None:
    read = stream(Pieces(TEXT, 4))
    assert read.head(10)[0] == TEXT[:10]
    assert read.head(10_000)[0] == TEXT
    assert symbols_of(window(batches(read))) == symbols_of(window(batches(stream(Pieces(TEXT, 4)))))


def test_nothing_to_read() -> None:
    with pytest.raises(LmappError, match="holds no text"):
        window(batches(stream(Pieces("", 4))))
    with pytest.raises(LmappError, match="at its end"):
        window(batches(stream(Pieces("a", 4, once=True))))
    shorter = batches(stream(Pieces("abc", 4, once=True)))
    with pytest.raises(LmappError, match="shorter than it was"):
        shorter.load_state_dict({"window": 3, "pass": 0, "symbol": 72, "batch": 1})


def test_an_unknown_character_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 5 + "é", encoding="utf-8")
    read = Stream(
        resolve([str(tmp_path / "a.txt")], cache_dir=tmp_path), policy=TextPolicy(), separator=None, column="text"
    )
    loader = StreamBatches(read, Vocabulary("abc"), batch_size=1, sequence_length=5, steps=4, reset_state=False)
    with pytest.raises(LmappError, match=r"'é' .*is not in the alphabet. It stands in .*a.txt, character 15"):
        window(loader)


def test_bytes_that_cannot_be_decoded_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc" * 30 + b"\xff" + b"abc" * 30 + b"\xff")
    said: list[str] = []
    read = Stream(
        resolve([str(tmp_path / "a.txt")], cache_dir=tmp_path),
        policy=TextPolicy(errors="skip"),
        separator=None,
        column="text",
        say=said.append,
    )
    loader = batches(read, 2, 9, 4)
    for _ in range(6):
        window(loader)
    assert said[0] == "The stream holds bytes that are not utf-8; 2 bytes were left out so far."
    assert said[1:] == ["A pass over the stream has ended; in it 2 bytes were left out."] * 2


# Runs -----------------------------------------------------------------------------------------------------------------


def options(tmp_path: Path, name: str, **data: Any) -> dict[str, Any]:
    return {
        "name": name,
        "data": {"batch_size": 4, "sequence_length": 16, "streaming": True, "stream_steps": 5, **data},
        "model": {"hidden_size": 12, "dropout": 0.2},
        "train": {"max_steps": 33, "val_every_steps": 10, "precision": "fp32"},
        "gradients": {"every_steps": 15, "max_lag": 8, "windows": 2},
        "logging": {"wandb": "disabled", "every_steps": 1},
    }


def losses(run: Path) -> list[Any]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]


def test_a_run_on_a_stream_is_stopped_and_goes_on_exactly(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        part = real_text[number * 700 : number * 700 + 650]
        (tmp_path / f"{number}.txt").write_text(part + "✓" * (number == 2), encoding="utf-8")
    (tmp_path / "val.txt").write_text(real_text[5000:7000], encoding="utf-8")
    data = {
        "path": ["?.txt"],
        "val_path": ["val.txt"],
        "shuffle_files": True,
        "alphabet_from": 400,
        "reset_state": True,
    }
    whole = lmapp.train(options(tmp_path, "whole", **data), quiet=True)
    from lmapp.training.module import LanguageModule

    steps = LanguageModule.optimizer_step

    def interrupt(self: Any, *arguments: Any) -> None:
        steps(self, *arguments)
        self.stop_requested = self.progress.step in (5, 13, 21)

    monkeypatch.setattr(LanguageModule, "optimizer_step", interrupt)
    with pytest.raises(lmapp.run.Interrupted):
        lmapp.train(options(tmp_path, "parts", **data), quiet=True)
    for _ in range(2):
        with pytest.raises(lmapp.run.Interrupted):
            lmapp.train(resume="parts", quiet=True)
    parts = lmapp.train(resume="parts", quiet=True)
    assert losses(parts.path) == losses(whole.path)
    assert len(losses(whole.path)) >= 33
    saved = [torch.load(run.path / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, parts)]
    assert all(torch.equal(a, b) for a, b in zip(*(s["state_dict"].values() for s in saved), strict=True))
    assert saved[0]["lmapp"]["corpus"]["facts"]["validation_characters"] == 2000
    assert not list((tmp_path / "data/cache").glob("**/*.tmp"))
    assert lmapp.load(whole.path).generate("the", 20)


@pytest.mark.parametrize("alphabet", ["characters", "bytes"])
def test_what_is_piped_in_is_trained_on_to_its_end(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, alphabet: str
) -> None:
    content = (real_text[:1500] + "é").encode()

    def pipe() -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    pipe()
    made = options(tmp_path, "piped", path="-", alphabet=alphabet)
    made["train"]["max_steps"] = 1000
    if alphabet == "characters":
        made["data"]["alphabet_from"] = 200
    run = lmapp.train(made, quiet=True)
    assert run.metrics["state"] == "finished"
    assert run.metrics["characters"] == 1500
    assert run.metrics["steps"] < 40
    made["name"] = "half"
    made["train"]["max_steps"] = 9
    pipe()
    half = lmapp.train(made, quiet=True)
    pipe()
    rest = lmapp.train(resume=str(half.path), changes={"train": {"max_steps": 1000}}, quiet=True)
    assert rest.metrics["characters"] == 1500
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"another text" * 99)))
    with pytest.raises(LmappError, match="not the one this run was trained on"):
        lmapp.train(resume=str(half.path), changes={"train": {"max_steps": 2000}}, quiet=True)
