"""`lmapp corpus`: what it prints, and how a wrong command line ends."""

import json
import random
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmapp.cli import main
from lmapp.config import option_name, option_names

ASCII = string.ascii_lowercase + " \n"


class Result(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def corpus(capsys: pytest.CaptureFixture[str], real_text: str) -> Command:
    """`lmapp corpus ARGUMENTS`, beside the file `text.txt`."""
    Path("text.txt").write_text("".join(character for character in real_text if character in ASCII)[:30_000])

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code: Any = 0
        try:
            main(["corpus", *map(str, arguments)])
        except SystemExit as end:
            code = end.code or 0
        return Result(code, *capsys.readouterr())

    return run


def test_a_screen_of_it(corpus: Command) -> None:
    result = corpus("text.txt", "--data.batch-size", 4, "--data.sequence-length=32")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert len(lines) < 40
    names = [line[:11].strip() for line in lines]
    assert names[:4] == ["corpus", "read as", "text", "lines"]
    assert {"alphabet", "frequent", "rare", "kinds", "splits", "batches", "bits/char", "on disk"} <= set(names)
    assert "text        30,000 characters, 30,000 bytes as UTF-8" in lines
    assert "splits      train 27,000 (90.0 %), validation 3,000 (10.0 %)" in lines
    assert "batches     4 rows × 32 characters, 211 steps an epoch" in lines


def test_json_is_one_document(corpus: Command) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices(ASCII[:26], k=draw.randint(2, 9))) for _ in range(6000)]
    Path("text.txt").write_text("\n".join(" ".join(words[i : i + 9]) for i in range(0, 6000, 9))[:30_000])
    result = corpus("text.txt", "--json")
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document["characters"] == 30_000
    assert document["batches"]["batch_size"] == 32
    assert document["findings"] == []


def test_a_character_that_no_text_may_hold_is_valid_json(corpus: Command) -> None:
    Path("s.txt").write_text("a\\ud800b" * 10)
    result = corpus("s.txt", "--data.encoding", "raw_unicode_escape", "--json")
    assert json.loads(result.out)["problem"] == "s.txt, character 1 is a lone surrogate, not a character."


def test_several_names(corpus: Command) -> None:
    Path("b.txt").write_text("b" * 100)
    both = corpus("text.txt", "b.txt", "--json").out
    assert [file["name"] for file in json.loads(both)["files"]] == ["text.txt", "b.txt"]
    assert both == corpus("text.txt", "--json", "--data.path", "b.txt").out
    assert both == corpus("--data.path", "text.txt", "--data.path", "b.txt", "--json").out


def test_a_text_too_short_to_train_on_is_shown(corpus: Command) -> None:
    Path("one.txt").write_text("a")
    result = corpus("one.txt")
    assert (result.code, result.err) == (0, "")
    assert "text        1 character, 1 byte as UTF-8" in result.out
    assert "It cannot be trained on. one.txt is a single character" in result.out


def test_standard_input() -> None:
    """In a process of its own, as it can be read once."""
    done = subprocess.run(
        [sys.executable, "-m", "lmapp", "corpus", "-", "--json"],
        input=b"some text\n" * 50,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    document = json.loads(done.stdout)
    assert document["files"] == [{"name": "standard input", "bytes": 500, "characters": 500}]
    assert document["splits"]["train"]["characters"] == 450


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("none.txt", 1, "none.txt: no such file."),
        ("text.txt --data.batch-size 0", 2, "--data.batch-size is a whole number at least 1, not '0'."),
        ("text.txt --data.batchsize 3", 2, "There is no option --data.batchsize. Did you mean --data.batch-size?"),
        ("--model.cell gru text.txt", 2, "There is no option --model.cell."),
        ("text.txt --data.batch-size", 2, "--data.batch-size needs a value."),
        ("text.txt --data 3", 2, "--data is a section: name an option of it, as in lmapp corpus --help."),
        ("text.txt --data.corpus shakespeare", 2, "--data.path and --data.corpus exclude each other"),
        ("text.txt --data.hub a/b", 2, "--data.path and --data.hub exclude each other"),
        ("text.txt --data.val-fraction 0.6 --data.test-fraction 0.5", 2, "leave nothing to train on"),
        ("text.txt --data.streaming", 2, "--data.streaming is for texts that may never end"),
        ("--data.corpus nothing", 2, "--data.corpus nothing: no corpus has this name"),
    ],
)
@pytest.mark.parametrize("json_", [False, True])
def test_a_wrong_command_line(corpus: Command, arguments: str, code: int, expected: str, json_: bool) -> None:
    result = corpus(*arguments.split(), *["--json"] * json_)
    assert (result.code, result.out) == (code, "")
    assert expected in result.err
    assert 1 <= len(result.err.splitlines()) <= 3


def test_help_lists_every_option_of_the_text(corpus: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    result = corpus("--help")
    assert result.code == 0
    for keys in option_names():
        assert (f" {option_name(keys)} " in result.out) == (keys[0] == "data"), keys
    assert " --json " in result.out
