"""One text from every kind of source: each run is stopped, goes on, and ends with the same figures, bit for bit."""

import bz2
import csv
import functools
import gzip
import http.server
import io
import json
import lzma
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import lmapp
from lmapp.run import Interrupted
from lmapp.training.module import LanguageModule

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEPS, STOP = 24, 9


@pytest.fixture(scope="module")
def text(real_text: str) -> str:
    return real_text[3000:5000] + "\r\n“é✓”\r\n\tfin"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a server of the files in the current directory."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _file(name: str, pack: Callable[[bytes], bytes] = bytes) -> Callable[[str], dict[str, Any]]:
    def write(text: str) -> dict[str, Any]:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(pack(text.encode()))
        return {"path": name}

    return write


def _zip(text: str) -> dict[str, Any]:
    with zipfile.ZipFile("a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("other.md", "not this")
        archive.writestr("a.txt", text.encode())
    return {"path": "zip://*.txt::a.zip"}


def _tar(text: str) -> dict[str, Any]:
    with tarfile.open("a.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("in/a.txt.xz")
        packed = lzma.compress(text.encode())
        info.size = len(packed)
        archive.addfile(info, io.BytesIO(packed))
    return {"path": "a.tar.gz"}


def _jsonl(text: str) -> dict[str, Any]:
    Path("a.jsonl").write_text(json.dumps({"id": 1, "body": text}) + "\n")
    return {"path": "a.jsonl", "column": "body"}


def _csv(text: str) -> dict[str, Any]:
    with open("a.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["n", "text"], ["1", text]])
    return {"path": "a.csv"}


def _parquet(text: str) -> dict[str, Any]:
    pyarrow.parquet.write_table(pyarrow.table({"text": [text], "n": [1]}), "a.parquet")
    return {"path": "a.parquet"}


def _pieces(text: str) -> dict[str, Any]:
    Path("d/e").mkdir(parents=True)
    half = len(text) // 2
    for name, part in (("d/a.txt", text[:half]), ("d/e/b.txt", text[half:])):
        Path(name).write_bytes(part.encode())
    Path("d/.hidden").write_text("not this")
    return {"path": "d", "separator": ""}


KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "txt": _file("a.txt"),
    "gz": _file("a.txt.gz", gzip.compress),
    "bz2": _file("a.bz2", bz2.compress),
    "xz": _file("a.txt.xz", lzma.compress),
    "zst": _file("a.txt.zst", zstd.compress),
    "zip": _zip,
    "tar.gz": _tar,
    "jsonl": _jsonl,
    "csv": _csv,
    "parquet": _parquet,
    "directory": _pieces,
    "glob": lambda text: _pieces(text) | {"path": "d/**/*.txt"},
    "http": lambda text: _file("a.txt.gz", gzip.compress)(text) | {"path": "ADDRESS/a.txt.gz?raw=1"},
    "stdin": lambda text: {"path": "-"},
    "utf-16": lambda text: _file("a.txt", lambda raw: raw.decode().encode("utf-16"))(text),
}


def figures(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]


def config(name: str, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "data": {"batch_size": 4, "sequence_length": 16, **data},
        "model": {"hidden_size": 8},
        "train": {"max_steps": STEPS, "val_every_steps": 8, "precision": "fp32"},
        "gradients": {"every_steps": 0},
        "logging": {"wandb": "disabled", "every_steps": 1},
    }


@pytest.fixture(scope="module")
def expected(text: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The figures of an uninterrupted run on a plain file."""
    root = tmp_path_factory.mktemp("plain")
    (root / "plain.txt").write_bytes(text.encode())
    made = config("plain", {"path": str(root / "plain.txt"), "cache_dir": str(root / "cache")})
    return figures(lmapp.train({**made, "runs_dir": str(root / "runs")}, quiet=True).path)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_gone_on(
    text: str, expected: list[dict[str, Any]], kind: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = KINDS[kind](text)
    data["path"] = data["path"].replace("ADDRESS", address)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    step = LanguageModule.optimizer_step

    def interrupt(self: LanguageModule, *arguments: Any) -> None:
        step(self, *arguments)
        self.stop_requested = self.progress.step == STOP

    monkeypatch.setattr(LanguageModule, "optimizer_step", interrupt)
    with pytest.raises(Interrupted):
        lmapp.train(config("run", data), quiet=True)
    assert figures(lmapp.train(resume="run", quiet=True).path) == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stdin"])
def test_as_a_stream(text: str, kind: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = KINDS[kind](text)
    data["path"] = data["path"].replace("ADDRESS", address)
    Path("plain.txt").write_bytes(text.encode())
    stream = {"streaming": True, "stream_steps": 7}
    runs = [lmapp.train(config(str(n), d | stream), quiet=True) for n, d in enumerate([data, {"path": "plain.txt"}])]
    assert figures(runs[0].path) == figures(runs[1].path)


def test_a_password_is_told_nobody(
    text: str, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _file("a.txt")(text)
    made = config("run", {"path": address.replace("//", "//me:secret@") + "/a.txt"})
    made["logging"]["wandb"] = "offline"
    monkeypatch.setattr("sys.argv", ["lmapp", "train", "--data.path", made["data"]["path"]])
    run = lmapp.train(made).path
    said = capsys.readouterr()
    assert address.partition("//")[2] in said.out
    assert "secret" not in said.out + said.err
    holding = {file.name for file in run.rglob("*") if file.is_file() and b"secret" in file.read_bytes()}
    assert holding <= {"config.yaml", "last.ckpt", "best.ckpt"}  # to go on with
    assert list(run.glob("wandb/**/*.wandb"))
