"""Checkpoint files: written whole or not at all, and read without running or believing anything."""

import errno
import os
import pickle
import random
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lmapp
from lmapp.checkpoint import (
    BEST,
    LAST,
    VERSION,
    CheckpointError,
    import_options,
    read,
    resolve,
    run_directory,
    write,
)
from lmapp.errors import LmappError, UsageError


def content(fill: float = 1.0, size: int = 40) -> dict[str, Any]:
    """As small as a checkpoint gets."""
    return {
        "state_dict": {
            "model.w": torch.full((size,), fill),
            "model.b": torch.arange(6, dtype=torch.float64).view(2, 3),
        },
        "lmapp": {
            "version": VERSION,
            "config": {"seed": 3},
            "vocabulary": "é\n",
            "corpus": {"name": "text", "key": "k", "fingerprint": "f", "facts": {"unigram_bits": 4.5}},
            "plan": {
                "precision": "fp32",
                "threads": 1,
                "processes": 1,
                "sequence_length": 64,
                "truncation_length": 64,
                "kernels": ["scan"],
                "device": "cpu",
                "cpu": "AVX2 with oneDNN",
            },
            "progress": {"step": 3, "state": "running", "best": None},
            "states": None,
            "tokens": None,
            "keep": None,
            "random": {},
            "records": {},
            "wandb_id": None,
        },
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert len(str(caught.value).splitlines()) <= 3
    assert caught.value.exit_code == 1
    return str(caught.value).replace(str(path), path.name)


# Writing --------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", content())
    assert same(read(tmp_path / "a.ckpt"), content())
    write(tmp_path / "a.ckpt", content(2.0))
    assert same(read(tmp_path / "a.ckpt"), content(2.0))
    assert os.listdir(tmp_path) == ["a.ckpt"]


def _no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _torch_fails(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nframe #0: …")


@pytest.mark.parametrize("old", [True, False], ids=["replacing", "new"])
@pytest.mark.parametrize(
    ("where", "fail", "reason"),
    [
        (os, {"fsync": _no_space}, "No space left on device"),
        (os, {"replace": _no_space}, "No space left on device"),
        (torch, {"save": _no_space}, "No space left on device"),
        (torch, {"save": _torch_fails}, "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
    ],
    ids=["fsync", "replace", "save", "save of torch"],
)
def test_a_failing_write_leaves_the_old_file_and_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    fail: dict[str, Callable[..., None]],
    reason: str,
    old: bool,
) -> None:
    path = tmp_path / "a.ckpt"
    if old:
        write(path, content())
    before = path.read_bytes() if old else None
    with monkeypatch.context() as patch:
        for name, function in fail.items():
            patch.setattr(where, name, function)
        with pytest.raises(LmappError) as caught:
            write(path, content(2.0))
    assert str(caught.value).splitlines()[0] == f"The checkpoint {path} could not be written: {reason}."
    assert str(caught.value).splitlines()[1:] == [
        "The one before it is whole: make room, then resume." if old else "There is none before it."
    ]
    assert os.listdir(tmp_path) == (["a.ckpt"] if old else [])
    assert (path.read_bytes() if old else None) == before


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    write(tmp_path / "a.ckpt", content())
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.ckpt", content(2.0))
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert same(read(tmp_path / "a.ckpt"), content())


def test_what_a_killed_writer_left_is_overwritten(tmp_path: Path) -> None:
    leftover = tmp_path / ".a.ckpt.tmp"
    leftover.write_bytes(b"half a checkpoint")
    write(tmp_path / "a.ckpt", content())
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert same(read(tmp_path / "a.ckpt"), content())


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LmappError, match="could not be written: No such file or directory"):
        write(tmp_path / "nowhere" / "a.ckpt", content())
    (tmp_path / "file").touch()
    with pytest.raises(LmappError, match="could not be written: Not a directory"):
        write(tmp_path / "file" / "a.ckpt", content())


def test_a_full_disk(tmp_path: Path) -> None:
    """The system itself refuses to let the file grow: torch's own writer must take that without ending the process."""
    pytest.importorskip("resource")
    script = """
        import resource, sys
        from pathlib import Path
        import torch
        from lmapp import checkpoint
        from lmapp.errors import LmappError

        path = Path(sys.argv[1])
        def content(size, fill):
            return {"state_dict": {"w": torch.full((size,), fill)}, "lmapp": {"version": checkpoint.VERSION}}
        def found():
            return torch.load(path, weights_only=True)["state_dict"]["w"].tolist()
        checkpoint.write(path, content(10, 1.0))
        for limit in (0, 1, 100, 3000, 60_000, 399_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                checkpoint.write(path, content(100_000, 2.0))
            except LmappError as error:
                assert "could not be written: File too large." in str(error), error
                print(limit, [p.name for p in path.parent.iterdir()], found())
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpoint.write(path, content(2, 3.0))
        print(found())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "a.ckpt")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [f"{limit} ['a.ckpt'] {[1.0] * 10}" for limit in (0, 1, 100, 3000, 60_000, 399_000)]
    assert done.stdout.splitlines() == [*lines, "[3.0, 3.0]"]


# Reading what is damaged ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("intact") / "a.ckpt"
    write(path, content())
    return path.read_bytes()


def test_a_file_cut_short_anywhere(tmp_path: Path, intact: bytes) -> None:
    path = tmp_path / "a.ckpt"
    for length in [*range(0, len(intact), 23), *range(len(intact) - 30, len(intact))]:
        path.write_bytes(intact[:length])
        refusal(path)


def test_a_changed_bit_anywhere(tmp_path: Path, intact: bytes) -> None:
    """It is refused, or lies in what no reader looks at (padding, dates) and the content is the same."""
    path = tmp_path / "a.ckpt"
    rng = random.Random(1)
    refused = 0
    for place in range(len(intact)):
        damaged = bytearray(intact)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read(path)
        except CheckpointError:
            refused += 1
            continue
        assert same(found, content()), place
    assert refused > len(intact) / 3


def test_a_changed_bit_in_a_tensor(tmp_path: Path, intact: bytes) -> None:
    path = tmp_path / "a.ckpt"
    ones = torch.ones(40).numpy().tobytes()
    start = intact.index(ones)
    for place in range(start, start + len(ones)):
        damaged = bytearray(intact)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert refusal(path).startswith("a.ckpt is damaged (in "), place


def test_a_tensor_marked_as_a_directory(tmp_path: Path, intact: bytes) -> None:
    """One bit of the archive's directory makes torch read a tensor's content as zeros or garbage."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(intact)
    with zipfile.ZipFile(path) as archive:
        entries, place = archive.infolist(), archive.start_dir
    for entry in entries:
        damaged = bytearray(intact)
        damaged[place + 38] |= 0x10
        path.write_bytes(damaged)
        assert refusal(path) == f"a.ckpt is damaged (in {entry.filename})."
        lengths = [int.from_bytes(intact[place + at : place + at + 2], "little") for at in (28, 30, 32)]
        place += 46 + sum(lengths)


def test_bytes_added_or_taken_out(tmp_path: Path, intact: bytes) -> None:
    path = tmp_path / "a.ckpt"
    half = len(intact) // 2
    for damaged in (intact[:100] + intact[200:], intact[:half] + b"x" + intact[half:], b"x" + intact, intact[1:]):
        path.write_bytes(damaged)
        refusal(path)


@pytest.mark.parametrize(
    "written", [b"", b"P", b"PK", b"PK\x03\x04", b"To be, or not to be\n", b"\x80\x02}q\x00.", bytes(1000)]
)
def test_files_that_are_no_archive(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(written)
    assert refusal(path) == "a.ckpt is no checkpoint, or a damaged one (not a torch archive)."


def test_a_zip_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("letter.txt", "hello")
    assert refusal(path).startswith("a.ckpt is damaged: ")
    with zipfile.ZipFile(path, "w"):
        pass
    refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02]q\x00.")
    refusal(path)


def test_no_file_and_a_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.ckpt") == "There is no checkpoint none.ckpt."
    (tmp_path / "d.ckpt").mkdir()
    assert refusal(tmp_path / "d.ckpt") == "d.ckpt cannot be read: Is a directory."


# Reading what is somebody else's --------------------------------------------------------------------------------------


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.victim,)


@pytest.mark.parametrize("place", ["lmapp", "state_dict", "further"])
def test_a_checkpoint_that_carries_code_runs_nothing(tmp_path: Path, place: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "a.ckpt"
    torch.save({**content(), place: Evil(victim)}, path)
    assert refusal(path) == (
        "a.ckpt holds more than tensors and plain values, so it was not opened: reading it could run code."
    )
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists(), "the checkpoint of this test was harmless"


def test_a_bare_pickle_runs_nothing(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "a.ckpt"
    path.write_bytes(pickle.dumps({**content(), "lmapp": Evil(victim)}))
    refusal(path)
    torch.save({"lmapp": Evil(victim)}, path, _use_new_zipfile_serialization=False)
    refusal(path)
    assert not victim.exists()


@pytest.mark.filterwarnings("ignore")  # that this kind of module is deprecated
def test_a_compiled_module_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    refusal(path)


@pytest.mark.parametrize(
    ("cell", "named", "modules"),
    [
        ("stranger:Cell", "stranger:Cell", ["stranger"]),
        (["stranger:Cell"], "stranger:Cell", ["stranger"]),
        (["stranger:Cell", "gru"], "stranger:Cell", ["stranger"]),
        (["lmapp.cells.gru:GRU", "stranger", "stranger:Cell", "stranger:Cell"], "stranger:Cell", ["stranger"]),
        (("gru", "os:Cell", "stranger:Cell"), "stranger:Cell", ["stranger"]),
        (["a.b:C", "stranger:Cell", "a.b:D"], "a.b:C and stranger:Cell and a.b:D", ["a.b", "stranger"]),
    ],
)
def test_a_cell_that_would_have_to_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Any, named: str, modules: list[str]
) -> None:
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'victim')!r}, 'w')\nclass Cell: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "a.ckpt"
    saved = content()
    saved["lmapp"]["config"] = {"model": {"cell": cell}}
    write(path, saved)
    assert refusal(path).splitlines() == [
        f"a.ckpt was not opened, for the code of {named} is not lmapp's own: if you trust it, "
        f"add --import {' --import '.join(modules)}",
        f"In Python, import {', '.join(modules)} first.",
    ]
    with pytest.raises(CheckpointError, match="is not lmapp's own"):
        lmapp.load(path)
    assert not (tmp_path / "victim").exists()
    for module in modules:
        monkeypatch.setitem(sys.modules, module, sys)  # imported by who trusts it
    assert same(read(path), saved)


@pytest.mark.parametrize("cell", ["gru", ["gru", "lstm"], "lmapp.cells.gru:GRU", ["lmapp.cells.gru:GRU"]])
def test_cells_of_lmapp_need_no_leave(tmp_path: Path, cell: Any) -> None:
    saved = content()
    saved["lmapp"]["config"] = {"model": {"cell": cell}}
    write(tmp_path / "a.ckpt", saved)
    assert same(read(tmp_path / "a.ckpt"), saved)


@pytest.mark.parametrize("cell", [3, None, {"stranger:Cell": 1}, ["gru", 3], [["stranger:Cell"]], b"stranger:Cell"])
def test_cells_that_have_no_names(tmp_path: Path, cell: Any) -> None:
    saved = content()
    saved["lmapp"]["config"] = {"model": {"cell": cell}}
    write(tmp_path / "a.ckpt", saved)
    assert refusal(tmp_path / "a.ckpt") == "a.ckpt is no complete checkpoint of lmapp: its cells have no names."


@pytest.mark.parametrize("name", ["a; rm -rf ~:C", "--help:C", "a\nb:C", "a:\x1b[2J", ":C", "a..b:C", "a:", "a:b:c"])
def test_what_is_no_name_gets_into_no_command(tmp_path: Path, name: str) -> None:
    saved = content()
    saved["lmapp"]["config"] = {"model": {"cell": ["gru", name]}}
    write(tmp_path / "a.ckpt", saved)
    assert refusal(tmp_path / "a.ckpt") == f"a.ckpt is no complete checkpoint of lmapp: {name!r} names no cell."


def test_the_modules_to_import_as_a_command_has_them() -> None:
    assert import_options(["gru", "lmapp.cells.gru:GRU"]) == ""
    assert import_options(["own.cells:A", "gru", "own.cells:B", "other:C"]) == " --import own.cells --import other"


@pytest.mark.parametrize(
    "other",
    [
        {"state_dict": {"w": torch.ones(2)}},
        {"state_dict": {"w": torch.ones(2)}, "epoch": 3, "pytorch-lightning_version": "2.5.0", "optimizer_states": []},
        {"lmapp": {"version": VERSION}},
        {"lmapp": None, "state_dict": {}},
        {"lmapp": [VERSION], "state_dict": {}},
        {"w": torch.ones(2)},
        torch.ones(2),
        [1, 2],
        None,
    ],
)
def test_other_programs_files(tmp_path: Path, other: Any) -> None:
    torch.save(other, tmp_path / "a.ckpt")
    assert refusal(tmp_path / "a.ckpt") == "a.ckpt was not written by lmapp."


@pytest.mark.parametrize("version", [VERSION + 1, 0, None, "1"])
def test_another_version(tmp_path: Path, version: Any) -> None:
    saved = content()
    saved["lmapp"]["version"] = version
    write(tmp_path / "a.ckpt", saved)
    assert refusal(tmp_path / "a.ckpt") == (
        f"a.ckpt has checkpoint format {version}; this lmapp reads format {VERSION}."
    )


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("config", [3]),
        ("vocabulary", {}),
        ("corpus", {"key": "k"}),
        *(("plan", {**content()["lmapp"]["plan"], name: {}}) for name in content()["lmapp"]["plan"]),
        *(
            ("plan", {k: v for k, v in content()["lmapp"]["plan"].items() if k != n})
            for n in content()["lmapp"]["plan"]
        ),
        ("progress", {"step": "3"}),
    ],
)
def test_a_part_missing_or_of_another_kind(tmp_path: Path, part: str, wrong: Any) -> None:
    saved = content()
    for spoiled in ({**saved["lmapp"], part: wrong}, {k: v for k, v in saved["lmapp"].items() if k != part}):
        write(tmp_path / "a.ckpt", {**saved, "lmapp": spoiled})
        assert refusal(tmp_path / "a.ckpt") == "a.ckpt is no complete checkpoint of lmapp: a part is missing."


@pytest.mark.parametrize("part", ["states", "tokens", "random", "records", "wandb_id"])
def test_what_a_resumed_run_needs_is_there(tmp_path: Path, part: str) -> None:
    saved = content()
    del saved["lmapp"][part]
    write(tmp_path / "a.ckpt", saved)
    assert refusal(tmp_path / "a.ckpt") == "a.ckpt is no complete checkpoint of lmapp: a part is missing."


@pytest.mark.parametrize("config", [{}, {"model": 3}, {"model": {}}])
def test_reading_does_not_stumble_over_a_strange_configuration(tmp_path: Path, config: Any) -> None:
    saved = content()
    saved["lmapp"]["config"] = config
    write(tmp_path / "a.ckpt", saved)
    assert same(read(tmp_path / "a.ckpt"), saved)


# Finding --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In runs/: `both` and `last` with checkpoints, `fresh` without one, `notes`, which is no run, and a file."""
    directory = tmp_path / "runs"
    for age, (name, files) in enumerate({"both": (BEST, LAST), "zlast": (LAST,), "fresh": ()}.items()):
        (directory / name / "checkpoints").mkdir(parents=True)
        for file in files:
            (directory / name / "checkpoints" / file).touch()
        os.utime(directory / name, (1000 - age, 1000 - age))
    (directory / "zz-notes").mkdir()
    (directory / "file").touch()
    monkeypatch.chdir(tmp_path)
    return Path("runs")


def test_a_checkpoint_by_name_directory_or_file(runs: Path) -> None:
    best = runs / "both" / "checkpoints" / BEST
    assert resolve("both", runs) == best
    assert resolve("runs/both", runs) == best
    assert resolve("runs/both/", "elsewhere") == best
    assert resolve(str(best.absolute().parent.parent), "elsewhere") == best.absolute()
    assert resolve("zlast", runs) == runs / "zlast" / "checkpoints" / LAST
    assert resolve(str(runs / "both" / "checkpoints" / LAST), runs) == runs / "both" / "checkpoints" / LAST
    assert resolve("runs/file", runs) == runs / "file"


def test_a_run_by_name_or_directory(runs: Path) -> None:
    assert run_directory("fresh", runs) == runs / "fresh"
    assert run_directory("runs/both", "elsewhere") == runs / "both"
    (runs / "old").mkdir()
    (runs / "old" / "config.yaml").touch()
    assert run_directory("old", runs) == runs / "old"


def test_a_run_without_a_checkpoint(runs: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^The run runs/fresh has no checkpoint yet\.$"):
        resolve("fresh", runs)


@pytest.mark.parametrize("find", [resolve, run_directory])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bth", "Did you mean both?"),
        ("runs/bth", "Did you mean both?"),
        ("zlast2", "Did you mean zlast?"),
        ("qqqqqqq", "The latest in runs/ is both."),
        ("zz-notes", "The latest in runs/ is both."),
        ("runs", "The latest in runs/ is both."),
        (".", "The latest in runs/ is both."),
        ("..", "The latest in runs/ is both."),
        ("", "The latest in runs/ is both."),
        ("new\nline", "The latest in runs/ is both."),
    ],
)
def test_a_name_that_is_not_there(runs: Path, find: Callable[..., Path], name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(name, runs)
    what = "checkpoint or run" if find is resolve else "run"
    assert str(caught.value) == f"There is no {what} {name!r}. {hint}"


@pytest.mark.parametrize("place", ["nowhere", "runs/fresh", "runs/file"])
def test_a_place_without_runs(runs: Path, place: str) -> None:
    for find in (resolve, run_directory):
        with pytest.raises(UsageError, match=f"'both'. {place}/ holds no run.$"):
            find("both", place)


def test_a_file_is_no_run(runs: Path) -> None:
    with pytest.raises(UsageError, match=r"^runs/file is a file, not a run: name the run or its directory\.$"):
        run_directory("runs/file", runs)
