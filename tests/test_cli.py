"""The command line: what it shows, and how every bad input of a user ends."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import lmapp.inference
from lmapp import checkpoint
from lmapp.cli import main
from lmapp.config import option_name, option_names
from lmapp.errors import LmappError, UsageError
from lmapp.inference.language_model import LanguageModel


class Result(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output, which must be one JSON document without numbers that JSON does not have."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


Command = Callable[..., Result]


@pytest.fixture
def lmapp_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`lmapp ARGUMENTS`, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code: Any = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code or 0
        return Result(code, *capsys.readouterr())

    return run


def refused(result: Result, code: int, *words: str) -> list[str]:
    """Check that a command ended with an error that a user can read; its lines."""
    lines = result.err.splitlines()
    assert result.code == code, result
    assert 1 <= len(lines) <= 3, result.err
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err
    return lines


TINY = ("--model.hidden-size", 8, "--train.max-steps", 2, "--train.precision", "fp32", "--gradients.every-steps", 0,
        "--data.cache-dir", "cache", "--logging.wandb", "disabled")  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog.\n" * 40


@pytest.fixture
def train(lmapp_: Command, tmp_path: Path) -> Callable[..., Result]:
    """`lmapp train` for two steps of a small network; on `text.txt` unless another text is named."""
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*arguments: object, text: str | None = "text.txt") -> Result:
        path = () if text is None else ("--data.path", text)
        return lmapp_("train", *path, *TINY, *arguments)

    return run


def no_run(directory: Path = Path("runs")) -> bool:
    return not directory.is_dir() or not any(directory.iterdir())


def only_run(directory: Path = Path("runs")) -> Path:
    (run,) = directory.iterdir()
    return run


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


@pytest.fixture
def own_run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, `runs/tiny` in the working directory, that may be changed."""
    return Path(shutil.copytree(tiny_run, tmp_path / "runs" / "tiny")).relative_to(tmp_path)


# Help -----------------------------------------------------------------------------------------------------------------


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["gradients", "--help"], ["--version"], []])
def test_help_answers_without_torch(arguments: list[str]) -> None:
    script = f"""
import sys
from lmapp.cli import main
try:
    main({arguments!r})
finally:
    print(sorted({{"torch", "lightning", "wandb", "matplotlib"}} & set(sys.modules)), file=sys.stderr)
"""
    done = program("-c", script)
    assert done.stderr == "[]\n"
    assert done.stdout


def test_help_of_train_lists_every_option_with_its_default(lmapp_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    result = lmapp_("train", "--help")
    assert result.code == 0
    for keys in option_names():
        assert f" {option_name(keys)} " in result.out, keys
    assert " --resume " in result.out
    assert " --import " in result.out
    assert "[default: 0.004]" in result.out
    assert "[choices: adamw, adam, rmsprop, sgd]" in result.out


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("generate", "checkpoint prompt length temperature top-k top-p stop samples seed import runs-dir json"),
        ("evaluate", "checkpoint data.path data.corpus data.encoding data.column import data.cache-dir runs-dir json"),
        ("corpus", "data.path data.hub data.column data.alphabet data.val-path json"),
        ("infill", "checkpoint text mask import runs-dir json"),
        (
            "gradients",
            "data.path data.encoding data.column max-lag windows influence png import data.cache-dir runs-dir json",
        ),
        ("compare", "runs-dir json"),
    ],
)
def test_help_of_each_command(lmapp_: Command, command: str, names: str) -> None:
    result = lmapp_(command, "--help")
    assert result.code == 0
    assert all(f"--{name}" in result.out for name in names.split())
    assert result.out in (lmapp_(command, "-h").out, lmapp_(command, "--json", "--help").out)
    assert f" {command} " in lmapp_("--help").out


def test_no_command_shows_the_help(lmapp_: Command) -> None:
    assert lmapp_() == lmapp_("--help")


# The command line itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("trian x", 'Unknown command "trian". Did you mean "train"?'),
        ("--frobnicate", "--frobnicate"),
        ("train --data.batchsize 3", "There is no option --data.batchsize. Did you mean --data.batch-size?"),
        ("train --batch_size 3", "There is no option --batch_size. Did you mean --data.batch-size?"),
        ("train --train.hidden-size=3", "There is no option --train.hidden-size. Did you mean --model.hidden-size?"),
        ("train --train.frobnicate 3", "There is no option --train.frobnicate."),
        ("train --train 3", "--train is a section: name an option of it, as in lmapp train --help."),
        ("train --data {}", "--data is a section: name an option of it, as in lmapp train --help."),
        ("train --train.max-steps", "--train.max-steps needs a value."),
        ("train --train.max-steps --seed 3", "--train.max-steps needs a value."),
        ("train --data.path", "--data.path needs a value."),
        ("train --logging.tags --seed 3", "--logging.tags needs a value."),
        ("train --resume", "--resume needs a value."),
        ("train --import", "--import needs a value."),
        ("generate run --import", "--import needs a value."),
        ("compare run --import own", "There is no option --import."),
        ("generate", "lmapp generate needs a checkpoint; name it first: lmapp generate CHECKPOINT --option …"),
        ("evaluate --data.path a.txt run", "lmapp evaluate needs a checkpoint; name it first:"),
        ("generate run other", "lmapp generate does not know what to do with other."),
        ("generate run --lenght 3", "There is no option --lenght. Did you mean --length?"),
        ("generate run --length", "--length needs a value."),
        ("generate run --length x", "--length is a whole number, not 'x'."),
        ("generate run --length 1.5", "--length is a whole number, not '1.5'."),
        ("generate run --temperature hot", "--temperature is a number, not 'hot'."),
        ("generate run --stop", "--stop needs a value."),
        ("evaluate run --data.path", "--data.path needs a value."),
        ("evaluate run --corpus x", "There is no option --corpus. Did you mean --data.corpus?"),
        ("gradients", "Name at least one checkpoint or run: lmapp gradients RUN."),
        ("gradients --max-lag 1 run", "--max-lag is a whole number at least 2, not 1."),
        ("gradients --windows 0 run", "--windows is a whole number at least 1, not 0."),
        ("gradients --windows x run", "--windows is a whole number, not 'x'."),
        ("gradients run --png .", "--png is the name of a file to write, not '.'."),
        ("evaluate run --data.cache-dir=", "--data.cache-dir is a text, not ''."),
        ("evaluate run --data.corpus=", "--data.corpus is a text, not ''."),
        ("compare --runs-dir=", "--runs-dir is a text, not ''."),
        ("compare --frob", "There is no option --frob."),
    ],
)
def test_a_wrong_command_line_is_explained_in_one_line(lmapp_: Command, arguments: str, expected: str) -> None:
    result = lmapp_(*arguments.split())
    assert len(refused(result, 2, expected)) == 1
    assert result.out == ""
    assert no_run()


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("train.max-steps", "0", "a whole number at least 1, not '0'"),
        ("train.max-steps", "1.5", "a whole number at least 1, not '1.5'"),
        ("train.max-steps", "-3", "a whole number at least 1, not '-3'"),
        ("train.max-steps", "1e3", "a whole number at least 1, not '1e3'"),
        ("train.max-minutes", "0", "a number more than 0, not '0'"),
        ("train.learning-rate", "nan", "a number more than 0, not 'nan'"),
        ("train.learning-rate", "-inf", "a number more than 0, not '-inf'"),
        ("train.optimizer", "adamm", "one of adamw, adam, rmsprop, sgd, not 'adamm'. Did you mean adam?"),
        ("train.precision", "fp16", "one of auto, fp32, bf16, not 'fp16'. Did you mean bf16?"),
        ("train.device", "tpu", "one of auto, cpu, cuda, not 'tpu'"),
        ("train.clip-norm", "0", "a number more than 0, not '0'"),
        ("train.momentum", "1", "a number at least 0 and less than 1, not '1'"),
        ("train.carry-state", "maybe", "true or false, not 'maybe'"),
        ("data.shrink", "2", "true or false, not '2'"),
        ("data.batch-size", "0", "a whole number at least 1, not '0'"),
        ("data.sequence-length", "x", "a whole number at least 1, not 'x'"),
        ("data.val-fraction", "1", "a number at least 0 and less than 1, not '1'"),
        ("data.test-fraction", "-0.1", "a number at least 0 and less than 1, not '-0.1'"),
        ("data.byte-fallback", "maybe", "one of auto, true, false, not 'maybe'"),
        ("data.path", "", "a text or a list of them"),
        ("model.hidden-size", "0", "a whole number at least 1 and at most 1000000, not '0'"),
        ("model.num-layers", "1001", "a whole number at least 1 and at most 1000, not '1001'"),
        ("model.dropout", "1", "a number at least 0 and less than 1, not '1'"),
        ("gradients.max-lag", "1", "a whole number at least 2, not '1'"),
        ("logging.every-steps", "0", "a whole number at least 1, not '0'"),
        ("logging.wandb", "off", "one of auto, online, offline, disabled, not 'off'"),
        ("seed", "-1", "a whole number at least 0 and at most 4294967295, not '-1'"),
        ("seed", "1" * 30, "a whole number at least 0 and at most 4294967295"),
        ("name", "", "a text, not ''"),
        ("runs-dir", "", "a text, not ''"),
    ],
)
@pytest.mark.parametrize("joint", [" ", "="])
def test_impossible_values(train: Command, option: str, value: str, allowed: str, joint: str) -> None:
    words = [f"--{option}={value}"] if joint == "=" else [f"--{option}", value]
    result = train(*words)
    assert len(refused(result, 2, f"--{option} is {allowed}")) == 1
    assert result.out == ""
    assert no_run()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data.val-fraction", 0.5, "--data.test-fraction", 0.5], "leave nothing to train on"),
        (["--data.val-fraction", 0.6, "--data.test-fraction", 0.7], "leave nothing to train on"),
        (["--train.clip-norm", 1, "--train.clip-value", 1], "exclude each other"),
        (["--model.activation", "relu"], "--model.activation is an option of the vanilla cell"),
        (["--data.corpus", "tiny_shakespeare"], "--data.path and --data.corpus exclude each other"),
        (["--model.bidirectional", "true"], "has read the character it is to predict"),
        (["--model.bidirectional"], "To restore masked characters: --model.kind infill"),
        (["--model.bidirectional=maybe"], "--model.bidirectional is true or false, not 'maybe'."),
        (["--model.bidirectional", "false", "--model.kind", "infill"], "needs the text on both sides"),
        (["--model.window", 4], "--model.window is an option of kind window; --model.kind is recurrent."),
        (["--model.mask-fraction", 0.5], "--model.mask-fraction is an option of kind infill"),
        (["--model.kind", "window", "--model.cell", "lstm"], "--model.cell is an option of kind recurrent and infill"),
        (["--model.kind", "window", "--model.init", "identity"], "--model.init identity is of recurrent matrices"),
        (["--model.kind", "infill", "--model.cell", "concatenated"], "the outputs of Concatenated are the logits"),
        (["--model.kind", "infill", "--train.bptt", "sliding"], "options of kind recurrent; --model.kind is infill."),
    ],
)
def test_options_that_do_not_go_together(train: Command, arguments: list[object], expected: str) -> None:
    refused(train(*arguments), 2, expected)
    assert no_run()


def test_later_options_win(train: Command) -> None:
    assert train("--name", "a", "--seed", 3, "--seed", 4, "--train.carry-state", "--train.carry-state", "no").code == 0
    config = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert (config["seed"], config["train"]["carry_state"]) == (4, False)


def test_an_empty_separator_is_a_value(train: Command) -> None:
    assert train("--data.separator", "", "--data.path", "text.txt", "text.txt").code == 0
    config = yaml.safe_load((only_run() / "config.yaml").read_text())
    assert config["data"]["separator"] == ""
    assert config["data"]["path"] == ["text.txt"] * 3


# Configurations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model: [1\n", "c.yaml, line 2, column 1: not valid YAML"),
        ("just text\n", "c.yaml: a configuration is a mapping of sections, this is a str."),
        (
            "model: {hiden_size: 3}\n",
            "c.yaml: There is no option --model.hiden-size. Did you mean --model.hidden-size?",
        ),
        ("model: 3\n", "c.yaml: model is a section: it takes options below it, not 3."),
        ("train: {max_steps: many}\n", "c.yaml: --train.max-steps is a whole number at least 1, not 'many'."),
    ],
)
def test_a_configuration_that_is_wrong(train: Command, content: str, expected: str) -> None:
    Path("c.yaml").write_text(content)
    refused(train("c.yaml"), 2, expected)
    assert no_run()


def test_a_configuration_that_is_not_there(train: Command) -> None:
    refused(train("none.yaml"), 2, "There is no configuration file none.yaml.")


def test_a_configuration_behind_a_list(train: Command) -> None:
    for option in ("--data.path", "--logging.tags"):
        result = train(option, "text.txt", "configs/gru.yaml")
        refused(result, 2, "configs/gru.yaml is a configuration, not text: put it before the options.")
    assert no_run()


def test_text_in_place_of_a_configuration(train: Command) -> None:
    refused(train("text.txt"), 2, "If it is text to train on: --data.path text.txt")


def test_later_files_and_options_win(train: Command, lmapp_: Command) -> None:
    Path("a.yaml").write_text("model: {hidden-size: 4, num_layers: 2}\nseed: 5\ndata: {path: nothing.txt}\n")
    Path("b.yaml").write_text("model: {hidden_size: 5}\nname: both\n")
    assert lmapp_("train", "a.yaml", "b.yaml", *TINY, "--data.path", "text.txt").code == 0
    config = yaml.safe_load(Path("runs/both/config.yaml").read_text())
    assert config["model"]["hidden_size"] == 8
    assert (config["model"]["num_layers"], config["seed"]) == (2, 5)
    # What was written is usable as input.
    assert lmapp_("train", "runs/both/config.yaml", "--name", "again").code == 0
    assert summary(Path("runs/again"))["best"] == summary(Path("runs/both"))["best"]


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("missing.txt", ["missing.txt: no such file"]),
        ("missing*.txt", ["No file matches 'missing*.txt'"]),
        ("nothing", ["There is no file that is not hidden in the directory nothing."]),
        ("empty.txt", ["empty.txt is empty"]),
        ("one.txt", ["one.txt is a single character; it takes at least 2 to predict one."]),
        ("latin.txt", ["latin.txt, byte 203: 0xe9 is not utf-8", "--data.encoding cp1252", "--data.errors replace"]),
        ("cut.txt", ["cut.txt, byte 200: 0xc3 only begins a character of utf-8"]),
        ("bad.txt.gz", ["bad.txt.gz is damaged or no .gz file"]),
        ("rows.jsonl", ["rows.jsonl, line 1 has no column 'text'", "--data.column"]),
        ("archive.zip", ["archive.zip is damaged or no .zip file"]),
    ],
)
def test_a_text_that_cannot_be_read(train: Command, text: str, words: list[str]) -> None:
    Path("empty.txt").touch()
    Path("one.txt").write_text("a")
    Path("latin.txt").write_bytes(b"x" * 200 + "café au lait".encode("latin-1"))
    Path("nothing").mkdir()
    Path("nothing/.hidden").write_text(TEXT)
    Path("cut.txt").write_bytes(b"x" * 200 + b"\xc3")
    Path("bad.txt.gz").write_bytes(b"no archive")
    Path("rows.jsonl").write_text('{"body": "x"}\n')
    Path("archive.zip").touch()
    refused(train(text=text), 1, *words)
    assert no_run()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252", "UTF8"])
def test_another_encoding_works_when_it_is_named(train: Command, encoding: str) -> None:
    Path("other.txt").write_bytes(("café " * 100).encode(encoding))
    result = train("--data.encoding", encoding, text="other.txt")
    assert (result.code, result.err) == (0, "")
    assert "other.txt: 500 characters" in result.out
    assert "alphabet    5 characters" in result.out


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_byte_order_mark_is_believed(train: Command, encoding: str) -> None:
    Path("other.txt").write_bytes(("café " * 100).encode(encoding))
    result = train(text="other.txt")
    assert (result.code, result.err) == (0, "")
    assert f"utf-8 or by byte order mark: {encoding}, 1 byte order mark removed" in result.out
    assert "alphabet    5 characters" in result.out


@pytest.mark.parametrize(("name", "hint"), [("utf-88", "Did you mean utf-8?"), ("klingon", "Python's names are meant")])
def test_an_unknown_encoding(train: Command, name: str, hint: str) -> None:
    refused(train("--data.encoding", name), 2, f"--data.encoding: there is no text encoding {name!r}.", hint)
    assert no_run()


@pytest.mark.parametrize("length", [2, 3, 5, 63, 64, 65, 66, 128, 129])
def test_a_tiny_text_trains_and_says_what_shrank(train: Command, length: int) -> None:
    """T is 64: texts of up to T characters and little more."""
    Path("tiny.txt").write_text(TEXT[:length])
    result = train(text="tiny.txt")
    assert (result.code, result.err) == (0, ""), result
    assert f"tiny.txt: {length} characters" in result.out
    validation = length // 10 if length >= 20 else 0
    targets = length - validation - 1
    assert f"too few for 32 rows of 64 characters: {max(1, targets // 64)} × {min(64, targets)} are used." in result.out
    done = summary(only_run())
    assert (done["state"], done["steps"]) == ("finished", 2)
    assert done["characters"] >= 2 * min(targets, 1)
    if not validation:
        assert "The text is too short for a validation split." in result.out


def test_five_lines_have_a_train_split(train: Command) -> None:
    Path("five.txt").write_text("one\ntwo\nthree\nfour\nfive\n")
    result = train(text="five.txt")
    assert (result.code, result.err) == (0, "")
    assert "splits      train 22, validation 2" in result.out
    assert "1 × 21 are used" in result.out
    assert summary(only_run())["steps"] == 2


def test_shrinking_can_be_forbidden(train: Command) -> None:
    Path("five.txt").write_text("one\ntwo\nthree\nfour\nfive\n")
    for words in (["--data.shrink", "false"], ["--data.shrink=no"]):
        refused(train(*words, text="five.txt"), 1, "--data.batch-size 1 --data.sequence-length 21")
    assert no_run()
    assert train("--data.shrink", "yes", text="five.txt").code == 0


def test_validation_can_be_off(train: Command) -> None:
    result = train("--data.val-fraction", 0)
    assert (result.code, result.err) == (0, "")
    assert "validation is off" in result.out
    run = only_run()
    assert summary(run)["best"] is None
    assert (run / "checkpoints" / "best.ckpt").is_file()


def test_a_validation_character_that_training_lacks(train: Command) -> None:
    Path("late.txt").write_text(TEXT + "ζζ")
    result = train(text="late.txt")
    assert (result.code, result.err) == (0, "")
    assert "2 characters of validation and test (1 distinct) never occur in the training text" in result.out
    refused(train("--data.byte-fallback", "false", text="late.txt"), 1, "'ζ' (U+03B6) occurs in the validation split")


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("gruu", ["no cell is called 'gruu'. Did you mean 'gru'?", "Known: vanilla, lstm, gru, gru_before, "]),
        ("transformer", ["no cell is called 'transformer'."]),
        ("nowhere.at_all:Cell", ["'nowhere.at_all:Cell' cannot be imported"]),
    ],
)
def test_an_unknown_cell(train: Command, cell: str, words: list[str]) -> None:
    refused(train("--model.cell", cell), 2, *words)
    assert no_run()


def test_a_network_that_no_memory_holds(train: Command) -> None:
    refused(train("--model.hidden-size", 1_000_000), 2, "GiB of memory", "--model.hidden-size")
    assert no_run()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(train: Command) -> None:
    refused(train("--train.device", "cuda"), 2, "--train.device is cuda, but no CUDA device can be used here.")
    assert no_run()


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_an_existing_run_is_not_overwritten(train: Command, own_run: Path) -> None:
    before = contents(own_run)
    refused(train("--name", "tiny"), 2, "The run runs/tiny exists and is not overwritten.", "--resume tiny")
    assert contents(own_run) == before


@pytest.mark.parametrize("name", ["a/b", "..", ".", "/tmp/x", "-x", "a\nb"])
def test_a_name_is_plain(train: Command, name: str) -> None:
    refused(train(f"--name={name}"), 2, f"--name is a plain name, not {name!r}")
    assert no_run()


def test_a_place_for_runs_that_is_a_file(train: Command) -> None:
    refused(train("--runs-dir", "text.txt", "--name", "a"), 1, "text.txt/a cannot be made: Not a directory.")
    assert Path("text.txt").read_text() == TEXT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_for_runs_that_is_not_writable(train: Command) -> None:
    Path("locked").mkdir(mode=0o500)
    refused(train("--runs-dir", "locked", "--name", "a"), 1, "locked/a cannot be made: Permission denied.")


def test_a_place_for_runs_that_cannot_be_written(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    assert train("--name", "first").code == 0  # makes the cache
    monkeypatch.setattr(Path, "mkdir", refuse)
    refused(train("--name", "a"), 1, "runs/a cannot be made: Permission denied.")


# Going on -------------------------------------------------------------------------------------------------------------


def test_resume_of_nothing(lmapp_: Command, own_run: Path) -> None:
    refused(lmapp_("train", "--resume", "tyni"), 2, "There is no run 'tyni'. Did you mean tiny?")
    refused(lmapp_("train", "--resume", "tiny", "--runs-dir", "none"), 2, "none/ holds no run.")
    refused(lmapp_("train", "--resume", own_run / "config.yaml"), 2, "config.yaml is a file, not a run")


def test_resume_of_a_finished_run(lmapp_: Command, own_run: Path) -> None:
    before = contents(own_run)
    refused(lmapp_("train", "--resume", "tiny"), 2, "The run runs/tiny is finished (step 30).", "--train.max-steps")
    refused(lmapp_("train", "--resume", "tiny", "--train.max-steps", 30), 2, "is finished")
    refused(lmapp_("train", "--resume", "tiny", "--train.max-steps", 10), 2, "beyond the limit given (10 steps)")
    assert contents(own_run) == before


def test_resume_with_a_higher_limit(lmapp_: Command, own_run: Path) -> None:
    result = lmapp_("train", "--resume", "tiny", "--train.max-steps", 32, "--logging.tags", "more")
    assert (result.code, result.err) == (0, "")
    assert "goes on after step 30 of 32" in result.out
    assert (summary(own_run)["state"], summary(own_run)["steps"]) == ("finished", 32)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--train.learning-rate", "0.5"),
        ("--model.hidden-size", "17"),
        ("--data.batch-size", "3"),
        ("--data.path", "other.txt"),
        ("--data.corpus", "tiny_shakespeare"),
        ("--seed", "7"),
        ("--name", "other"),
        ("--gradients.windows", "3"),
        ("--train.precision", "bf16"),
    ],
)
def test_resume_with_an_option_that_may_not_change(lmapp_: Command, own_run: Path, option: str, value: str) -> None:
    before = contents(own_run)
    result = lmapp_("train", "--resume", "tiny", "--train.max-steps", "40", option, value)
    refused(result, 2, option, "cannot change when a run goes on: only limits and logging can.")
    assert contents(own_run) == before


def test_resume_takes_no_configuration(lmapp_: Command, own_run: Path) -> None:
    result = lmapp_("train", own_run / "config.yaml", "--resume", "tiny")
    refused(result, 2, "--resume takes the run's own configuration")


def test_resume_refuses_a_wrong_option_as_training_does(lmapp_: Command, own_run: Path) -> None:
    result = lmapp_("train", "--resume", "tiny", "--train.max-steps", "0")
    refused(result, 2, "--train.max-steps is a whole number at least 1, not '0'.")


@pytest.mark.parametrize("damage", ["truncate", "flip", "code", "text", "gone"])
def test_resume_with_a_damaged_checkpoint(lmapp_: Command, own_run: Path, damage: str) -> None:
    last = own_run / "checkpoints" / "last.ckpt"
    spoil(last, damage)
    before = contents(own_run)
    result = lmapp_("train", "--resume", "tiny", "--train.max-steps", 40)
    refused(result, 1, "last.ckpt" if damage != "gone" else "has no checkpoint to go on from")
    assert contents(own_run) == before
    assert not Path("pwned").exists()


class Evil:
    """Unpickling it makes the file `pwned`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("pwned"),)


def spoil(path: Path, how: str) -> None:
    written = bytearray(path.read_bytes())
    path.unlink()  # best.ckpt may be the same file
    match how:
        case "truncate":
            path.write_bytes(written[: len(written) // 2])
        case "flip":
            written[len(written) // 2] ^= 1
            path.write_bytes(written)
        case "text":
            path.write_text("no checkpoint")
        case "empty":
            path.touch()
        case "code":
            torch.save({"state_dict": {}, "lmapp": {"version": checkpoint.VERSION, "config": Evil()}}, path)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "evaluate", "gradients"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("truncate", "best.ckpt is no checkpoint, or a damaged one"),
        ("flip", "best.ckpt is damaged (in archive/data/"),
        ("text", "best.ckpt is no checkpoint"),
        ("empty", "best.ckpt is no checkpoint"),
        ("code", "reading it could run code"),
    ],
)
def test_a_damaged_checkpoint(lmapp_: Command, own_run: Path, command: str, damage: str, words: str) -> None:
    spoil(own_run / "checkpoints" / "best.ckpt", damage)
    result = lmapp_(command, "tiny")
    refused(result, 1, words)
    assert result.out == ""
    assert not Path("pwned").exists()
    assert not Path("gradients.png").exists()


@pytest.mark.parametrize("command", ["generate", "evaluate", "gradients"])
@pytest.mark.parametrize("name", ["tyni", "runs/tyni", "", ".", "runs", "no\nway"])
def test_an_unknown_checkpoint(lmapp_: Command, own_run: Path, command: str, name: str) -> None:
    result = lmapp_(command, name)
    hint = "Did you mean tiny?" if "tyni" in name else "The latest in runs/ is tiny."
    assert refused(result, 2) == [f"There is no checkpoint or run {name!r}. {hint}"]
    assert result.out == ""


def test_a_checkpoint_needs_nothing_else(lmapp_: Command, tiny_run: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_run / "checkpoints" / "best.ckpt", tmp_path / "alone.ckpt")
    result = lmapp_("generate", "alone.ckpt", "--length", 20, "--seed", 1)
    assert (result.code, result.err) == (0, "")
    assert len(result.out) == 21
    assert sorted(os.listdir(tmp_path)) == ["alone.ckpt"]


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def generate(lmapp_: Command, tiny_run: Path) -> Command:
    return lambda *arguments: lmapp_("generate", tiny_run, *arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--length", -1], "--length is a whole number at least 0, not -1."),
        (["--temperature", -0.5], "--temperature is a number at least 0 (0 is greedy), not -0.5."),
        (["--temperature", "nan"], "--temperature is a number at least 0 (0 is greedy), not nan."),
        (["--temperature", "inf"], "--temperature is a number at least 0 (0 is greedy), not inf."),
        (["--top-k", 0], "--top-k is a whole number at least 1, not 0."),
        (["--top-p", 0], "--top-p is a number more than 0 and at most 1, not 0.0."),
        (["--top-p", 2], "--top-p is a number more than 0 and at most 1, not 2.0."),
        (["--top-p", "nan"], "--top-p is a number more than 0 and at most 1, not nan."),
        (["--samples", 0], "--samples is a whole number at least 1, not 0."),
        (["--samples", -2], "--samples is a whole number at least 1, not -2."),
        (["--seed", "9" * 30], "--seed is a whole number"),
    ],
)
@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_impossible_sampling(generate: Command, arguments: list[object], expected: str, json_: list[str]) -> None:
    result = generate(*arguments, *json_)
    refused(result, 2, expected)
    assert result.out == ""


@pytest.mark.parametrize(("prompt", "where"), [("ζ", "character 1, 'ζ'"), ("a\nB", "character 3, 'B'")])
@pytest.mark.parametrize("more", [[], ["--json"], ["--samples", 2]])
def test_an_unseen_character_in_the_prompt(generate: Command, prompt: str, where: str, more: list[object]) -> None:
    result = generate("--prompt", prompt, *more)
    refused(result, 2, f"The prompt's {where}", "--data.byte-fallback true")
    assert result.out == ""


def test_a_prompt_that_is_no_text(generate: Command) -> None:
    refused(generate("--prompt", "\udcff"), 2, "The prompt")


@pytest.mark.parametrize("prompt", ["", "the ", "a\n"])
def test_length_counts_new_characters(generate: Command, prompt: str) -> None:
    for length in (0, 1, 50):
        result = generate("--prompt", prompt, "--length", length, "--seed", 1)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith(prompt)
        assert len(result.out) == len(prompt) + length + 1


def test_a_prompt_may_begin_with_a_hyphen(generate: Command) -> None:
    for words in (["--prompt", "- a"], ["--prompt=-a"]):
        refused(generate(*words), 2, "The prompt's character 1, '-'")


def test_top_k_beyond_the_alphabet_is_the_whole_alphabet(generate: Command) -> None:
    plain = generate("--seed", 3, "--length", 60)
    assert generate("--seed", 3, "--length", 60, "--top-k", 10**9) == plain
    assert generate("--seed", 3, "--length", 60, "--top-p", 1) == plain
    assert generate("--seed", 4, "--length", 60) != plain


def test_temperature_zero_is_greedy(generate: Command) -> None:
    greedy = generate("--temperature", 0, "--length", 30, "--seed", 1)
    assert greedy == generate("--temperature", 0, "--length", 30, "--seed", 2)
    assert greedy == generate("--top-k", 1, "--length", 30)


def test_stop_strings(generate: Command) -> None:
    text = generate("--seed", 3, "--length", 100).out
    for stops in ([text[40:43]], [text[60:61], text[40:43]], ["QQQ", text[50:52]]):
        end = min(at for stop in stops if (at := text.find(stop)) >= 0)
        expected = text[:end] + "\n"
        assert generate("--seed", 3, "--length", 100, "--stop", *stops).out == expected
        repeated = [word for stop in stops for word in ("--stop", stop)]
        assert generate("--seed", 3, "--length", 100, *repeated).out == expected


def test_samples(generate: Command) -> None:
    result = generate("--samples", 3, "--length", 10, "--prompt", "the ", "--seed", 5)
    document = generate("--samples", 3, "--length", 10, "--prompt", "the ", "--seed", 5, "--json").document
    assert (document["prompt"], document["seed"], document["step"]) == ("the ", 5, 30)
    assert [len(text) for text in document["texts"]] == [10, 10, 10]
    assert result.out == "".join(f"--- {n} ---\nthe {text}\n" for n, text in enumerate(document["texts"], 1))


def test_json_of_generate_says_which_seed_it_drew(generate: Command) -> None:
    first = generate("--length", 20, "--json").document
    again = generate("--length", 20, "--seed", first["seed"])
    assert again.out == first["texts"][0] + "\n"
    assert generate("--length", 20, "--json").document["seed"] != first["seed"]


# Figures --------------------------------------------------------------------------------------------------------------


def test_evaluate(lmapp_: Command, tiny_run: Path) -> None:
    result = lmapp_("evaluate", tiny_run)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("the run's validation split: 2,000 characters\n")
    document = lmapp_("evaluate", tiny_run, "--json").document
    assert document["loss"] == pytest.approx(summary(tiny_run)["best"]["val/loss"], abs=1e-6)
    assert document["cold"]["characters"] == document["characters"] == 1999
    assert f"loss {document['loss']:.4f} nats" in result.out
    assert f"loss {document['cold']['loss']:.4f} nats" in result.out


def test_evaluate_another_text(lmapp_: Command, tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    document = lmapp_("evaluate", tiny_run, "--data.path", "a.txt", "--data.cache-dir", "cache", "--json").document
    assert (document["text"], document["characters"]) == ("a.txt", len(TEXT) - 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("UPPER", ["'U' (U+0055) is not in the vocabulary", "a.txt, character 0", "--data.byte-fallback true"]),
        ("abc\nde ζ", ["'ζ' (U+03B6) is not in the vocabulary", "a.txt, character 7"]),
        ("", ["a.txt is empty."]),
        ("a", ["a.txt is a single character"]),
        (None, ["a.txt: no such file."]),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "gradients"])
@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_a_text_that_cannot_be_scored(
    lmapp_: Command, tiny_run: Path, command: str, content: str | None, words: list[str], json_: list[str]
) -> None:
    if content is not None:
        Path("a.txt").write_text(content, encoding="utf-8")
    result = lmapp_(command, tiny_run, "--data.path", "a.txt", "--data.cache-dir", "cache", *json_)
    refused(result, 1, *words)
    assert result.out == ""


def test_the_text_a_model_was_trained_on_is_gone(lmapp_: Command, tiny_run: Path) -> None:
    for command in ("evaluate", "gradients"):
        result = lmapp_(command, tiny_run, "--data.cache-dir", "nowhere")
        refused(result, 1, "The text this model was trained on is no longer in nowhere.", "--data.path FILE")


def test_a_run_without_validation_has_nothing_to_evaluate(train: Command, lmapp_: Command) -> None:
    assert train("--data.val-fraction", 0, "--name", "a").code == 0
    refused(lmapp_("evaluate", "a"), 1, "nothing to score in the run's validation split", "--data.path FILE")


def test_an_unknown_corpus(lmapp_: Command, tiny_run: Path, train: Command) -> None:
    refused(lmapp_("evaluate", tiny_run, "--data.corpus", "shakespear"), 2, "did you mean shakespeare?")
    refused(train("--data.corpus", "shakespear", text=None), 2, "did you mean shakespeare?")
    assert no_run()


def test_gradients(lmapp_: Command, tiny_run: Path) -> None:
    result = lmapp_("gradients", tiny_run)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["tiny", "gru,", "step", "30,", "measured", "on", "the", "run's", "validation", "split"]
    assert lines[-1].split() == ["picture", "gradients.png"]
    named = {line[:11].strip() for line in lines}
    assert {
        *("lag", "R states", "R inputs", "half-life", "horizon", "rate", "99 %", "R at τ", "cut off"),
        *("Jacobian", "Lyapunov", "direction", "bounds", "gates", "keeping", "weights"),
        *("norms", "threshold", "verdict"),
    } <= named
    assert Path("gradients.png").read_bytes().startswith(b"\x89PNG")
    far = lmapp_("gradients", tiny_run, "--max-lag", 200, "--windows", 1).out.splitlines()
    lags, R = (next(line for line in far if line.startswith(name)) for name in ("lag", "R states"))
    assert lags.split()[1:] == ["0", "2", "5", "10", "20", "50", "100", "200"]
    assert len(lags) == len(R) <= 80
    result = lmapp_("gradients", tiny_run, tiny_run, "--json", "--png", "sub/two.png", "--max-lag", 4, "--windows", 2)
    assert (result.code, result.err) == (0, "")
    first, second = result.document["checkpoints"]
    assert first == second
    assert first["curves"][0]["lags"] == [0, 1, 2, 3, 4]
    assert {"decay/half_life", "decay/inputs/half_life", "spectrum/lyapunov"} <= first["figures"].keys()
    assert first["intervals"]["half_life"].keys() == {"low", "high"}
    assert len(first["spectrum"]["eigenvalues"]) == first["spectrum"]["size"] == 16
    assert first["bounds"].keys() == {"not_defined"}
    assert [gate["name"] for gate in first["gates"][0]["gates"]] == ["r", "z", "n"]
    assert sum(first["weight_gradient"][0]["share"]) == pytest.approx(1)
    assert first["clipping"]["quantiles"].keys() == {"10", "50", "90", "99"}
    assert result.document["png"] == "sub/two.png"
    assert Path("sub/two.png").is_file()


def test_bounds_and_what_the_weights_say_are_those_of_a_vanilla_network(lmapp_: Command, train: Command) -> None:
    assert train(*TINY, "--model.cell", "vanilla", "--train.max-steps", 5, "--name", "rnn").code == 0
    result = lmapp_("gradients", "rnn", "--json", "--max-lag", 12)
    (document,) = result.document["checkpoints"]
    R, bounds = document["curves"][0]["R"], document["bounds"]
    assert len(R) == len(bounds["product"]) == 13
    for measured, product, uniform in zip(R, bounds["product"], bounds["uniform"], strict=True):
        assert measured <= product * (1 + 1e-5) <= uniform * (1 + 1e-4)
    assert any("W_hh" in sentence for sentence in document["conditions"])
    assert "therefore" in lmapp_("gradients", "rnn", "--max-lag", 12).out


def test_the_influence_on_a_prediction(lmapp_: Command, tiny_run: Path) -> None:
    text = "the text is read from the left, and this is predicted"
    result = lmapp_("gradients", tiny_run, "--influence", text)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == text
    assert lines[1].split() == ["predicted", "'d',", "by", "tiny"]
    assert lines[2].startswith("rests on")
    assert Path("influence.png").read_bytes().startswith(b"\x89PNG")
    document = lmapp_("gradients", tiny_run, "--influence", text, "--json", "--png", "a.png").document
    assert "".join(document["characters"]) + document["predicted"] == text
    assert len(document["norms"]) == len(text) - 1
    assert max(document["norms"]) == document["norms"][-1], "an untrained network forgets at once"
    refused(lmapp_("gradients", tiny_run, "--influence", "a"), 2, "at least 2 characters")
    refused(lmapp_("gradients", tiny_run, "--influence", "a" * 4001), 2, "at most 4,000 characters")
    refused(lmapp_("gradients", tiny_run, "--png", "a.pdf"), 2, "--png writes PNG pictures: name it a.pdf.png")
    refused(lmapp_("gradients", tiny_run, "--influence", "Ä"), 2)
    refused(lmapp_("gradients", tiny_run, tiny_run, "--influence", "ab"), 2, "--influence is of one checkpoint")
    refused(lmapp_("gradients", tiny_run, "--influence", "ab", "--max-lag", 9), 2, "--max-lag does nothing")


def test_gradients_of_a_network_that_is_not_finite(lmapp_: Command, tiny_run: Path) -> None:
    content = checkpoint.read(tiny_run / "checkpoints" / "last.ckpt")
    content["state_dict"]["model.layers.0.weight_hh"][0, 0] = float("nan")
    checkpoint.write(Path("nan.ckpt"), content)
    for more in ([], ["--influence", "the text"]):
        refused(lmapp_("gradients", "nan.ckpt", *more), 1, "the network's weights are not finite")
    assert not list(Path().glob("*.png"))


def test_windows_that_do_not_fit_into_memory_are_refused(
    lmapp_: Command, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmapp.training import memory

    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    refused(lmapp_("gradients", tiny_run), 2, "of memory, and 1 MiB are available", "fewer --windows")
    assert not Path("gradients.png").exists()


def test_gradients_of_too_short_a_text(lmapp_: Command, tiny_run: Path) -> None:
    Path("a.txt").write_text("abcde")
    result = lmapp_("gradients", tiny_run, "--data.path", "a.txt", "--data.cache-dir", "cache")
    refused(result, 1, "there are 5 characters")
    assert not Path("gradients.png").exists()


def test_gradients_with_a_picture_that_cannot_be_written(lmapp_: Command, tiny_run: Path) -> None:
    Path("file").touch()
    Path("directory.png").mkdir()
    for png in ("file/x.png", "directory.png", "/dev/null/x.png"):
        result = lmapp_("gradients", tiny_run, "--windows", 1, "--max-lag", 2, "--png", png)
        refused(result, 1)
        assert result.out == ""
    assert sorted(os.listdir()) == ["directory.png", "file"]


def test_compare(lmapp_: Command, own_run: Path, tiny_run: Path) -> None:
    result = lmapp_("compare")
    assert (result.code, result.err) == (0, "")
    assert "tiny" in result.out
    assert lmapp_("compare", "tiny").out == result.out
    (run,) = lmapp_("compare", "--json").document["runs"]
    assert run["best_loss"] == pytest.approx(summary(own_run)["best"]["val/loss"])
    assert run["differences"] == {}
    config = yaml.safe_load((own_run / "config.yaml").read_text())
    (own_run / "config.yaml").write_text(yaml.safe_dump({**config, "seed": 5}))
    one, other = lmapp_("compare", "tiny", tiny_run, "--json").document["runs"]
    assert {one["differences"]["seed"], other["differences"]["seed"]} == {1, 5}


def test_compare_without_runs(lmapp_: Command) -> None:
    Path("runs").mkdir()
    for place in ("runs", "nowhere"):
        refused(lmapp_("compare", "--runs-dir", place), 2, f"{place}/ holds no run to compare.")


def test_compare_with_an_unknown_run(lmapp_: Command, own_run: Path) -> None:
    for names in (["tyni"], ["tiny", "tyni"]):
        result = lmapp_("compare", *names)
        assert result.code in (1, 2)
        refused(result, result.code, "There is no run 'tyni' in runs.", "tiny")
        assert result.out == ""
    Path("runs/tiny/metrics.jsonl").write_text("no json\n{}\n")
    refused(lmapp_("compare"), 1, "metrics.jsonl is damaged in line 1")


def test_figures_that_are_not_finite_stay_json(
    lmapp_: Command, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(self: LanguageModel, *args: Any, **kwargs: Any) -> Any:
        class Figures:
            def as_dict(self) -> dict[str, Any]:
                return {"loss": float("nan"), "cold": {"perplexity": float("inf")}, "all": (-float("inf"), 1.5)}

        return Figures()

    monkeypatch.setattr(LanguageModel, "evaluate", diverged)
    document = lmapp_("evaluate", tiny_run, "--json").document
    assert document == {"loss": "nan", "cold": {"perplexity": "inf"}, "all": ["-inf", 1.5]}


# Models of other kinds ------------------------------------------------------------------------------------------------


def train_kind(kind: str, root: Path) -> tuple[Path, str]:
    """A finished run `runs/KIND` and what training printed."""
    (root / "text.txt").write_text(TEXT)
    arguments = ["train", "--model.kind", kind, "--name", kind, "--runs-dir", root / "runs", *TINY]
    arguments += ["--data.path", root / "text.txt", "--data.cache-dir", root / "cache", "--gradients.every-steps", 500]
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit, match="0"):
        main([str(argument) for argument in arguments])
    return root / "runs" / kind, out.getvalue()


@pytest.fixture(scope="module")
def infill_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return train_kind("infill", tmp_path_factory.mktemp("infill"))


@pytest.fixture(scope="module")
def window_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return train_kind("window", tmp_path_factory.mktemp("window"))


@pytest.mark.parametrize("written", [["true"], [], ["--model.num-layers", 1], ["none"]])
def test_an_infill_model_may_be_called_bidirectional(train: Command, written: list[object]) -> None:
    assert train("--model.bidirectional", *written, "--model.kind", "infill", "--name", "a").code == 0
    config = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert config["model"]["bidirectional"] is (None if written == ["none"] else True)


def test_what_training_an_infill_model_says(infill_run: tuple[Path, str]) -> None:
    run, out = infill_run
    best = summary(run)["best"]["val/infill_loss"]
    assert f"{best:.4f} nats per masked character (step 2)" in out
    assert f"validation {best:.4f} nats a masked character  best" in out
    assert "infill-gru 1 × 8 each way" in out
    assert "each window by itself, 15 % of it masked" in out
    assert "No gradient decay is measured" in out
    assert out.count("unigram") == 2
    assert "bigram" not in out
    assert "perplexity" not in out
    commands = re.findall(r"^  lmapp (\w+)", out, re.MULTILINE)
    assert commands == ["infill", "evaluate", "compare"]


def test_what_training_a_window_model_says(window_run: tuple[Path, str]) -> None:
    run, out = window_run
    assert f"{summary(run)['best']['val/loss']:.4f} nats, perplexity" in out
    assert "window of 16 characters × 8, one-hot input" in out
    assert "there is nothing to truncate" in out
    assert "bigram" in out
    assert re.findall(r"^  lmapp (\w+)", out, re.MULTILINE) == ["generate", "evaluate", "gradients", "compare"]
    assert summary(run)["parameters"] == 16 * (29 + 1) * 8 + 8 + 8 * 29 + 29


def test_a_window_model_writes_and_is_evaluated(lmapp_: Command, window_run: tuple[Path, str]) -> None:
    run, _ = window_run
    document = lmapp_("generate", run, "--prompt", "the ", "--length", 30, "--seed", 1, "--json").document
    assert len(document["texts"][0]) == 30
    figures = lmapp_("evaluate", run, "--json").document
    assert figures["loss"] == pytest.approx(summary(run)["best"]["val/loss"], abs=1e-6)


def test_infill(lmapp_: Command, infill_run: tuple[Path, str]) -> None:
    run, _ = infill_run
    result = lmapp_("infill", run, "the qu_ck brown f_x")
    assert result.code == 0
    restored = result.out.removesuffix("\n")
    assert (restored[:6], restored[7:17], restored[18:]) == ("the qu", "ck brown f", "x")
    lines = result.err.splitlines()
    assert [line.split()[0] for line in lines] == ["7", "18"]
    assert f"{restored[6]!r} 0." in lines[0]
    document = lmapp_("infill", run, "the qu*ck brown f*x", "--mask", "*", "--json").document
    assert (document["text"], document["mask"], document["step"]) == (restored, "*", 2)
    assert [place["position"] for place in document["places"]] == [6, 17]
    assert [place["character"] for place in document["places"]] == [restored[6], restored[17]]
    assert len(document["places"][0]["alternatives"]) == 4
    by_name = lmapp_("infill", run.name, "the qu_ck brown f_x", "--runs-dir", run.parent)
    assert by_name == result


@pytest.mark.parametrize("arguments", [[], ["-"], ["--mask", "_"]])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_infill_reads_standard_input(
    lmapp_: Command,
    infill_run: tuple[Path, str],
    arguments: list[str],
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"the qu_ck\nbrown f_x{end}"))
    expected = lmapp_("infill", infill_run[0], "the qu_ck\nbrown f_x")
    assert lmapp_("infill", infill_run[0], *arguments) == expected
    assert expected.code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ab_", "--mask", "__"], "--mask is one character, not '__'."),
        (["ab_", "--mask="], "--mask is one character, not ''."),
        ([""], "There is no text to restore."),
        (["the fox"], "The text has no '_'"),
        (["the f_x", "--mask", "?"], "The text has no '?'"),
        (["th_ \u03b6"], "The text's character 5, '\u03b6' (U+03B6), never occurred in the training text"),
    ],
)
@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_what_infill_refuses(
    lmapp_: Command, infill_run: tuple[Path, str], arguments: list[str], words: str, json_: list[str]
) -> None:
    result = lmapp_("infill", infill_run[0], *arguments, *json_)
    refused(result, 2, words)
    assert result.out == ""


def test_infill_of_a_text_that_begins_with_a_hyphen(lmapp_: Command, infill_run: tuple[Path, str]) -> None:
    # The hyphen is no character of the alphabet, but it is taken for one of the text.
    refused(lmapp_("infill", infill_run[0], "-t_e"), 2, "The text's character 1, '-'")
    assert lmapp_("infill", infill_run[0], "t-e", "--mask", "-").code == 0


def test_infill_from_a_terminal_without_a_text(
    lmapp_: Command, infill_run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("never read"))
    refused(lmapp_("infill", infill_run[0]), 2, "Name the text", "lmapp infill CKPT TEXT")


def test_infill_of_what_is_not_text(lmapp_: Command, infill_run: tuple[Path, str]) -> None:
    for encoding in ("utf-8:strict", "utf-8:surrogateescape"):
        result = subprocess.run(
            [sys.executable, "-m", "lmapp", "infill", str(infill_run[0])],
            input=b"th_ \xff",
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )
        message = result.stderr.decode()
        assert (result.returncode, result.stdout) == (2, b""), message
        assert len(message.splitlines()) <= 3
        assert "UTF-8" in message


def test_evaluate_of_an_infill_model(lmapp_: Command, infill_run: tuple[Path, str]) -> None:
    run, _ = infill_run
    result = lmapp_("evaluate", run)
    assert (result.code, result.err) == (0, "")
    document = lmapp_("evaluate", run, "--json").document
    assert document == {
        "text": "the run's validation split",
        "infill_loss": pytest.approx(summary(run)["best"]["val/infill_loss"], abs=1e-6),
        "masked_characters": 27,
        "mask_fraction": 0.15,
        "window": summary(run)["sequence_length"],
    }
    assert f"infill loss {document['infill_loss']:.4f} nats per masked character" in result.out
    assert "27 masked characters" in result.out


def test_gradients_of_a_model_that_reads_both_ways(lmapp_: Command, infill_run: tuple[Path, str]) -> None:
    for more in ([], ["--influence", "the text"]):
        refused(lmapp_("gradients", infill_run[0], *more), 2, "an infill model", "from left to right")
    assert not list(Path().glob("*.png"))


def test_gradients_of_a_window_model(lmapp_: Command, window_run: tuple[Path, str]) -> None:
    """It has no state; what it reads has a gradient, and nothing beyond its window."""
    result = lmapp_("gradients", window_run[0])
    assert (result.code, result.err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert "nothing to truncate" in lines["verdict"]
    assert "R states" not in result.out
    assert "R inputs" in result.out
    assert not {"Jacobian", "bounds", "gates", "weights"} & lines.keys()
    assert Path("gradients.png").is_file()


def test_gradients_of_cells_without_recurrent_weights(lmapp_: Command, train: Callable[..., Result]) -> None:
    assert train("--model.cell", "mingru", "--name", "minimal").code == 0
    result = lmapp_("gradients", "minimal", "--max-lag", 4, "--windows", 1)
    assert (result.code, result.err) == (0, "")
    assert re.search("^weights +no cell here has recurrent weights of its own", result.out, re.MULTILINE)


def test_each_kind_of_model_does_its_own(
    lmapp_: Command, infill_run: tuple[Path, str], window_run: tuple[Path, str], tiny_run: Path
) -> None:
    for arguments in ([], ["--json"], ["--samples", 2]):
        refused(lmapp_("generate", infill_run[0], *arguments), 2, "is an infill model", "lmapp infill")
    for run in (window_run[0], tiny_run):
        refused(lmapp_("infill", run, "th_"), 2, "reads from left to right", "--model.kind infill")


def test_compare_of_all_kinds(
    lmapp_: Command, infill_run: tuple[Path, str], window_run: tuple[Path, str], tiny_run: Path
) -> None:
    result = lmapp_("compare", infill_run[0], window_run[0], tiny_run)
    assert result.code == 0
    assert "Infill loss (nats per masked character)" in result.out
    runs = lmapp_("compare", infill_run[0], window_run[0], tiny_run, "--json").document["runs"]
    assert runs[-1]["name"] == "infill"
    assert runs[-1]["best_infill_loss"] == pytest.approx(summary(infill_run[0])["best"]["val/infill_loss"])


# Cells from outside ---------------------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn
from lmapp.cells.protocol import Cell, HiddenState

class Leaky(Cell):
    state_type = HiddenState

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.gate_size = hidden_size
        self.weight = nn.Parameter(torch.empty(hidden_size, input_size).normal_())

    def project(self, x):
        return x @ self.weight.t().to(x.dtype)

    def step(self, gates, state):
        h = 0.9 * state.h + gates.tanh()
        return h.to(gates.dtype), HiddenState(h)

class Twin(Leaky):
    pass
"""


@pytest.fixture
def alone(lmapp_: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Each command as a program of its own, which has imported nothing of the user's yet; `own.py` lies here."""
    Path("own.py").write_text(OWN)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(*arguments: object) -> Result:
        monkeypatch.delitem(sys.modules, "own", raising=False)
        before = list(sys.path)
        try:
            return lmapp_(*arguments)
        finally:
            assert sys.path == before
            monkeypatch.delitem(sys.modules, "own", raising=False)

    return run


@pytest.fixture
def own_cells(alone: Command) -> Callable[..., Result]:
    """`lmapp train` on `text.txt` with the cells of `own.py`."""
    Path("text.txt").write_text(TEXT)
    return lambda *arguments: alone("train", *arguments, "--data.path", "text.txt", *TINY)


def ways_on(out: str) -> list[str]:
    return re.findall(r"^  lmapp (.*)$", out, re.MULTILINE)


@pytest.mark.parametrize("kind", ["recurrent", "infill"])
@pytest.mark.parametrize("cell", [["own:Leaky"], ["own:Leaky", "gru", "own:Twin"]], ids=len)
def test_what_is_trained_with_a_cell_of_ones_own_can_be_used(
    alone: Command, own_cells: Command, cell: list[str], kind: str
) -> None:
    """Every command that a run ends with is run, first without its --import."""
    trained = own_cells("--name", "mine", "--model.cell", *cell, "--model.kind", kind)
    assert (trained.code, trained.err) == (0, "")
    first = {"recurrent": ["generate", "evaluate", "gradients"], "infill": ["infill", "evaluate"]}[kind]
    commands = [f"{command} mine --import own" for command in first]
    assert ways_on(trained.out) == [*commands, "compare mine"]
    more = {"infill": ["th_"], "gradients": ["--max-lag", 4]}
    for command in first:
        words = more.get(command, [])
        result = alone(command, "mine", *words)
        refused(
            result, 1, f"the code of {' and '.join(c for c in cell if ':' in c)} is not lmapp's own", "--import own"
        )
        assert result.out == ""
        result = alone(command, "--import", "own", "mine", *words)
        assert result.code == 0, result.err
        assert result.out
    assert alone("compare", "mine").code == 0
    further = ["train", "--resume", "mine", "--train.max-steps", 3]
    refused(alone(*further), 1, "last.ckpt was not opened", "if you trust it, add --import own")
    result = alone(*further, "--import", "own")
    assert (result.code, result.err) == (0, "")
    assert ways_on(result.out) == [*commands, "compare mine"]
    assert summary(Path("runs/mine"))["steps"] == 3


def test_a_cell_of_ones_own_in_a_configuration(alone: Command, own_cells: Command) -> None:
    Path("c.yaml").write_text("model: {cell: own:Leaky}\nname: mine\n")
    assert own_cells("c.yaml").code == 0
    refused(own_cells("c.yaml"), 2, "go on with it: lmapp train --resume mine --import own")


def test_an_interrupted_run_with_a_cell_of_ones_own_says_how_to_go_on(
    alone: Command, own_cells: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmapp.training.module import LanguageModule

    original = LanguageModule.training_step

    def training_step(module: Any, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return original(module, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModule, "training_step", training_step)
        result = own_cells("--name", "mine", "--model.cell", "own:Leaky")
    assert result.code == 130
    assert result.err.endswith("Go on with: lmapp train --resume mine --import own\n")
    assert alone("train", "--resume", "mine", "--import", "own").code == 0


def test_modules_that_cannot_be_imported(alone: Command, own_cells: Command, own_run: Path) -> None:
    Path("broken.py").write_text("def (\n")
    Path("raising.py").write_text("{}['x']\n")
    for command in (["generate", "tiny"], ["evaluate", "tiny"], ["infill", "tiny", "th_"], ["gradients", "tiny"]):
        result = alone(*command, "--import", "own", "--import", "broken")
        refused(result, 2, "--import broken: it cannot be imported (SyntaxError: ")
    refused(alone("train", "--resume", "tiny", "--import", "nowhere"), 2, "--import nowhere: it cannot be imported")
    refused(
        own_cells("--model.cell", "raising:Own"), 2, "--model.cell: 'raising:Own' cannot be imported (KeyError: 'x')."
    )
    refused(own_cells("--model.cell", "own:Nobody"), 2, "there is no class 'Nobody' in the module own.")
    assert [run.name for run in Path("runs").iterdir()] == ["tiny"]


def test_a_cell_of_ones_own_that_has_changed_since(alone: Command, own_cells: Command) -> None:
    assert own_cells("--name", "mine", "--model.cell", "own:Leaky").code == 0
    for change, said in (
        (OWN.replace("self.gate_size = hidden_size", "1 / 0"), "its constructor fails (ZeroDivisionError: "),
        (OWN.replace("0.9 * state.h", "1 / 0"), "step fails (ZeroDivisionError: division by zero)."),
        (OWN.replace("HiddenState(h)", "HiddenState(h.double())"), "h in the state from step is in torch.float64"),
        (OWN.replace("Leaky", "Leaking"), "there is no class 'Leaky' in the module own."),
        (OWN.replace("self.weight", "self.weights"), "is no complete checkpoint of lmapp"),
    ):
        Path("own.py").write_text(change)
        refused(alone("generate", "mine", "--import", "own"), 1, "runs/mine/checkpoints/best.ckpt ", said)


# Failures from outside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 1, "Out of memory. Try a smaller --model.hidden-size"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\n…"), 1, "Out of memory."),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\n"), 1, "Out of memory."),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (OSError(28, "No space left on device", "x/y"), 1, "x/y: No space left on device."),
        (OSError("odd"), 1, "odd."),
        (LmappError("a\nb"), 1, "a\nb"),
        (UsageError("c"), 2, "c"),
    ],
)
def test_how_failures_end(
    lmapp_: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(lmapp.inference, "load", fail)
    refused(lmapp_("generate", "x"), code, words)
    with pytest.raises(type(error)):
        lmapp_("--debug", "generate", "x")


def test_a_defect_of_ours_is_not_hidden(lmapp_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(lmapp.inference, "load", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        lmapp_("generate", "x")


@pytest.mark.parametrize("arguments", [["generate", "nothing"], ["train", "--seed", "x"], ["train", "--sede", "1"]])
def test_debug_shows_where_it_came_from(lmapp_: Command, arguments: list[str]) -> None:
    assert lmapp_(*arguments).code == 2
    for words in ([*arguments, "--debug"], ["--debug", *arguments]):
        with pytest.raises(Exception, match=r"no checkpoint or run|--seed is|--sede"):
            lmapp_(*words)


# The program itself ---------------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_ends_it_quietly(tiny_run: Path) -> None:
    command = [sys.executable, "-m", "lmapp", "generate", str(tiny_run), "--length", "1000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(10)) == 10  # it comes as it is written
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_an_error_of_the_program_and_a_terminal_that_lacks_characters(tiny_run: Path) -> None:
    done = program("-m", "lmapp", "generate", str(tiny_run), "--prompt", "ζ", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[0].startswith("The prompt's character 1, '\\u03b6' (U+03B6), never occurred")
