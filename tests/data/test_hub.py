"""Data sets of the hub, read from a stand-in server by a process of its own, since the hub's address is taken from the
environment when its libraries are imported."""

import csv
import gzip
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmapp.data.hub import HubDataset
from lmapp.data.sources import Source
from lmapp.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))
from hub_server import TOKEN, Hub, Request

del sys.path[0]

DRIVER = """
import hashlib, json, os, socket, sys, time
from lmapp.data import hub, sources
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError

slept, hosts, look_up = [], set(), socket.getaddrinfo
time.sleep = slept.append

def getaddrinfo(host, *args, **options):
    hosts.add(host)
    return look_up("127.0.0.1", *args, **options)

socket.getaddrinfo = getaddrinfo

def answer(
    column="text", policy={}, limit=None, token="", seconds=10, then="", separator=None, brief=False, **arguments
):
    del slept[:]
    hub.SECONDS = hub_constants.HF_HUB_DOWNLOAD_TIMEOUT = seconds
    os.environ["HF_TOKEN"] = token
    said, files, texts, first, out = [], [], [], [], {}
    reading = Reading()
    out.update(said=said, slept=list(slept), files=files, texts=texts, first=first)
    try:
        dataset = hub.HubDataset(say=said.append, **arguments)
        if then:
            out["identity"] = dataset.identity()
            print(json.dumps("asked"), flush=True)
            json.loads(sys.stdin.readline())
        if limit != 0:
            if separator is None:
                records = dataset.records(TextPolicy(**policy), column, reading)
                for file, opens, pieces in records:
                    files.append(file)
                    first.append(opens)
                    texts.append("".join(pieces))
                    if len(texts) == limit:
                        records.close()
                        break
            else:
                texts += sources.stream([dataset], policy=TextPolicy(**policy), separator=separator, reading=reading)
            out["size"] = dataset.size()
        out["identity"] = dataset.identity()
        assert dataset.stamp() == dataset.stamp()
        out["fingerprint"] = sources.fingerprint([dataset], TextPolicy(**policy), separator, column)
    except LmappError as error:
        out["error"] = [type(error).__name__, str(error)]
    out["bytes"], out["boms"], out["starts"] = reading.bytes, reading.boms, reading.starts
    out["slept"] = sum(slept)
    if brief:
        out["digest"] = hashlib.sha256("\\0".join(texts).encode()).hexdigest()
        del texts[:], files[:], first[:]
    return out

import datasets, huggingface_hub, logging
logging.basicConfig(level="WARNING")
from huggingface_hub import constants as hub_constants

def settings():
    session = huggingface_hub.utils.get_session()
    return repr([
        sorted((key, value) for key, value in vars(datasets.config).items() if isinstance(value, (int, float, str))),
        [(logging.getLogger(name).handlers, logging.getLogger(name).propagate, logging.getLogger(name).level)
         for name in ("datasets", "huggingface_hub")],
        datasets.are_progress_bars_disabled(), huggingface_hub.utils.are_progress_bars_disabled(), session.event_hooks,
    ])

before = settings()
for line in sys.stdin:
    request = json.loads(line)
    if request is None:
        reports = not hub_constants.HF_HUB_DISABLE_TELEMETRY
        reply = {"hosts": sorted(map(str, hosts)), "changed": before != settings(), "reports": reports}
    else:
        reply = answer(**request)
    print(json.dumps(reply), flush=True)
"""


class Reader:
    """The process that reads, with a terminal for what it has to say."""

    def __init__(self, directory: Path, **environment: str) -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        self.home = directory / "home"
        self.printed = b""
        self.slept = 0.0
        self._terminal, terminal = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=terminal,
            text=True,
            cwd=directory,
            env={**inherited, "HF_HOME": str(self.home), "OMP_NUM_THREADS": "1", **environment},
        )
        os.close(terminal)
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        with suppress(OSError):  # the end of a terminal
            while True:
                self.printed += os.read(self._terminal, 1000)

    def ask(self, request: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        hangs = threading.Timer(100, self._process.kill)
        hangs.start()
        reply = self._process.stdout.readline()
        hangs.cancel()
        assert reply, self.printed.decode()
        return json.loads(reply)

    def __call__(self, name: str, **options: Any) -> Any:
        return self.ask({"name": name, **options})

    def fails(self, name: str, said: int = 0, **options: Any) -> str:
        """The message, which has the form of all messages; after so many others."""
        answer = self(name, **options)
        assert "error" in answer, answer
        assert len(answer["said"]) == said
        self.slept = answer["slept"]
        kind, message = answer["error"]
        assert kind == ("UsageError" if message.startswith("--") else "LmappError")
        lines = message.split("\n")
        assert len(lines) <= 3 and all(lines)
        return message

    def close(self) -> None:
        self._process.communicate(timeout=60)
        self._listener.join()
        os.close(self._terminal)


@pytest.fixture(scope="module")
def _server() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def read(_server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(tmp_path_factory.mktemp("reader"), HF_ENDPOINT=_server.address)
    yield reader
    reader.close()


@pytest.fixture
def hub(_server: Hub) -> Iterator[Hub]:
    _server.reset()
    yield _server
    _server.reset()


TEXTS = [
    "2020-01-01",
    "2020-01-01T00:00:00Z",
    "CRLF\r\nand CR\rand LF\n",
    "NA",
    "null",
    "12",
    "1e5",
    "",
    " in front and behind ",
    "a \"quote\" and 'one', commas; semicolons\tand tabs",
    "line\u2028and\u0085next\x0c\x1c.",
    "\ufeffnot a mark \u00fc\U0001f600",
]


def digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def jsonl(texts: list[str], column: str = "text") -> bytes:
    return "".join(json.dumps({"n": n, column: text}) + "\n" for n, text in enumerate(texts)).encode()


def comma(texts: list[str], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(["n", "text"])
    writer.writerows(enumerate(texts))
    return file.getvalue().encode()


def parquet(texts: list[str | None], column: str = "text", other: Any = None, rows: int | None = None) -> bytes:
    file = io.BytesIO()
    columns = {"n": list(range(len(texts))) if other is None else other, column: pa.array(texts, pa.string())}
    pq.write_table(pa.table(columns), file, row_group_size=rows)
    return file.getvalue()


def arrow(texts: list[str]) -> bytes:
    file = io.BytesIO()
    table = pa.table({"text": texts})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    "jsonl": jsonl,
    "json": jsonl,
    "csv": comma,
    "tsv": lambda texts: comma(texts, "\t"),
    "parquet": parquet,
    "arrow": arrow,
    "jsonl.gz": lambda texts: gzip.compress(jsonl(texts)),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_come_as_they_are_stored(hub: Hub, read: Reader, kind: str) -> None:
    write = FORMATS[kind]
    files = {f"data/train-{n}.{kind}": write(texts) for n, texts in enumerate([TEXTS, TEXTS[::-1], ["last"]])}
    hub.add("o/" + kind, {**files, f"data/test-0.{kind}": write(["other"])})
    answer = read("o/" + kind)
    assert answer["texts"] == [*TEXTS, *TEXTS[::-1], "last"]
    assert answer["files"] == [f"o/{kind}/data/train-{n}.{kind}" for n in [0] * 12 + [1] * 12 + [2]]
    assert [n for n, first in enumerate(answer["first"]) if first] == [0, 12, 24]
    assert answer["bytes"] == answer["size"] == sum(map(len, files.values()))
    assert read("o/" + kind, split="test")["texts"] == ["other"]
    assert read("o/" + kind, split="test+train")["texts"] == ["other", *TEXTS, *TEXTS[::-1], "last"]


def test_plain_text_is_one_record_a_file(hub: Hub, read: Reader, real_text: str) -> None:
    first = "\ufeffone\r\ntwo\rthree\n\n\nfour\x0c\u2028 five  ".encode()
    second = real_text.encode()
    hub.add("o/plain", {"train/a.txt": first, "train/b.txt": second, "train/c.txt.gz": gzip.compress(b"packed\r\n")})
    answer = read("o/plain")
    assert answer["texts"] == [first.decode()[1:], real_text, "packed\r\n"]
    assert answer["boms"] == 1
    assert answer["bytes"] == answer["size"]


def test_a_policy_is_followed(hub: Hub, read: Reader) -> None:
    hub.add("o/policy", {"train.parquet": parquet(["A\r\nÜ", "B"])})
    assert read("o/policy", policy={"lowercase": True, "newlines": "lf"})["texts"] == ["a\nü", "b"]
    assert read("o/policy", policy={"as_bytes": True})["texts"] == ["A\r\nÃ\x9c", "B"]
    hub.add("o/policies", {"train.txt": "A\r\nÜ".encode()})
    assert read("o/policies", policy={"lowercase": True, "newlines": "lf"})["texts"] == ["a\nü"]
    assert read("o/policies", policy={"as_bytes": True})["texts"] == ["A\r\nÃ\x9c"]


def test_it_is_a_source_of_a_stream(hub: Hub, read: Reader) -> None:
    hub.add("o/stream", {"data/train-0.parquet": parquet(["one", "two"]), "data/train-1.parquet": parquet(["three"])})
    answer = read("o/stream", separator="|")
    assert "".join(answer["texts"]) == "one|two|three"
    assert answer["starts"] == [["o/stream/data/train-0.parquet", 0], ["o/stream/data/train-1.parquet", 8]]
    assert isinstance(HubDataset("o/stream"), Source)


def test_only_what_is_wanted_is_fetched(hub: Hub, read: Reader, real_text: str) -> None:
    """One column of Parquet; and nothing of what has not been read yet."""
    noise = random.Random(0)
    other = [noise.randbytes(7000) for _ in range(2000)]
    texts = [real_text[n * 300 : n * 300 + 300] for n in range(2000)]
    hub.add("o/column", {"train.parquet": parquet(texts, other=other)})
    answer = read("o/column")
    assert answer["texts"] == texts
    assert answer["size"] > 14_000_000 > 2 * hub.sent(".parquet")
    assert answer["bytes"] == answer["size"]

    hub.reset()
    wide = [noise.randbytes(4000).hex() for _ in range(2500)]
    hub.add("o/begun", {"train.parquet": parquet(wide, rows=200)})
    assert read("o/begun", limit=3)["texts"] == wide[:3]
    assert hub.sent(".parquet") < 14_000_000 < len(hub.repositories["o/begun"].files["train.parquet"]) - 5_000_000
    hub.add("o/begun_lines", {"train.jsonl": jsonl(wide)})
    assert read("o/begun_lines", limit=3)["texts"] == wide[:3]
    assert hub.sent(".jsonl") < 10_000_000 < len(hub.repositories["o/begun_lines"].files["train.jsonl"]) - 9_000_000


def test_identity_is_that_of_the_commit_which_is_read(hub: Hub, read: Reader) -> None:
    repository = hub.add("o/changing", {"train.jsonl": jsonl(["before"])})
    before, commit = dict(repository.files), repository.sha
    assert read.ask({"name": "o/changing", "then": "read"}) == "asked"
    repository.files = {"train.jsonl": jsonl(["after"])}
    repository.branches["old"] = before
    old = read.ask("go on")
    assert old["texts"] == ["before"]
    assert commit in old["identity"]
    new = read("o/changing")
    assert new["texts"] == ["after"]
    assert repository.sha in new["identity"]
    assert old["fingerprint"] != new["fingerprint"]
    assert read("o/changing", revision="old")["texts"] == read("o/changing@old")["texts"] == ["before"]

    hub.reset()
    pinned = read("o/changing", revision=commit, limit=0)
    assert pinned["identity"] == old["identity"]
    assert hub.requests == []
    others = [read("o/changing", limit=0, **{key: "other"})["identity"] for key in ("config", "split")]
    assert len({new["identity"], old["identity"], *others}) == 4


def test_a_moved_data_set_is_found(hub: Hub, read: Reader) -> None:
    hub.add("owner/moved", {"train.jsonl": jsonl(["here"])}, former_name="former")
    assert read("former")["texts"] == ["here"]


def test_a_directory_of_the_same_name_is_not_meant(hub: Hub, read: Reader) -> None:
    hub.add("o/local", {"train.jsonl": jsonl(["the hub's"])})
    local = read.home.parent / "o" / "local"
    local.mkdir(parents=True)
    (local / "train.jsonl").write_bytes(jsonl(["this machine's"]))
    assert read("o/local")["texts"] == ["the hub's"]


CARD = """---
configs:
- config_name: de
  data_files:
  - split: train
    path: de/*.csv
- config_name: en
  data_files: en.csv
  sep: ";"
- config_name: fr
  data_files: fr.csv
  sep: "|"
- config_name: other
  data_files: hf://datasets/o/languages@old/old.csv
- config_name: tab
  data_files: tab.csv
  sep: "\\t"
- config_name: old
  data_files: old.csv
  encoding: latin-1
---
A card.
"""


def test_configurations(hub: Hub, read: Reader) -> None:
    files = {
        "README.md": CARD.encode(),
        "de/1.csv": comma(["eins"]),
        "de/2.csv": comma(["zwei"]),
        "en.csv": comma(["one"], ";"),
        "fr.csv": comma(["un"], "|"),
        "tab.csv": b"a, b\ttext\n1\tdix, onze\n",
        "old.csv": comma(["früher"]).decode().encode("latin-1"),
    }
    hub.add("o/languages", files, branches={"old": {"old.csv": b""}})
    assert read("o/languages", config="de")["texts"] == ["eins", "zwei"]
    assert read("o/languages", config="en")["texts"] == ["one"]
    assert read("o/languages", config="tab")["texts"] == ["dix, onze"]
    assert read("o/languages", config="old")["texts"] == ["früher"]
    assert read.fails("o/languages") == (
        "--data.hub-config: o/languages has several configurations.\n"
        "Its configurations are: de, en, fr, other, tab, old. Name one."
    )
    assert "no configuration 'it'.\nIts configurations are: de, en" in read.fails("o/languages", config="it")
    message = read.fails("o/languages", config="fr")
    assert message.startswith("o/languages sets sep = '|', which is not followed here.\n")
    address = f"{hub.address}/datasets/o/languages/resolve/{hub.repositories['o/languages'].sha}/fr.csv"
    assert f"--data.path {address}\n" in message
    assert "takes its text from elsewhere" in read.fails("o/languages", config="other")

    default = CARD.replace("config_name: de", "config_name: de\n  default: true")
    hub.add("o/default", {**files, "README.md": default.encode()})
    assert read("o/default")["texts"] == ["eins", "zwei"]
    hub.add("o/none", {"train.csv": comma(["x"])})
    assert "has no configuration 'de'.\nIts configurations are: default." in read.fails("o/none", config="de")


def test_parts_and_names_that_cannot_be(hub: Hub, read: Reader) -> None:
    for split in ("train[:10%]", "train[5:]", "train:5"):
        with pytest.raises(UsageError, match=r"^--data.hub-split: .* asks for a part"):
            HubDataset("o/name", split=split)
    for name in ("", "a/b/c", "https://huggingface.co/datasets/o/name", "o/na me", "o/"):
        with pytest.raises(UsageError, match=r"^--data.hub: .* is not the name of a data set"):
            HubDataset(name)
    hub.add("o/split", {"train.jsonl": jsonl(["x"]), "validation.jsonl": jsonl(["y"])})
    assert read.fails("o/split", split="test") == (
        "--data.hub-split: o/split has no split 'test'.\nIts splits are: train, validation"
    )
    assert "no split 'all'" in read.fails("o/split", split="train+all")


def test_columns(hub: Hub, read: Reader) -> None:
    for kind in ("parquet", "arrow", "jsonl", "csv"):
        hub.add("o/col_" + kind, {f"train.{kind}": FORMATS[kind](["x"])})
        message = read.fails("o/col_" + kind, column="content")
        assert "no column 'content'" in message
        assert "text. Name one: --data.column" in message
    hub.add("o/column_name", {"train.parquet": parquet(["x"], column="content")})
    assert read("o/column_name", column="content")["texts"] == ["x"]
    assert read.fails("o/column_name", column="n") == (
        "o/column_name: column 'n' is of type int64, not a string.\n"
        "Columns of strings are: content. Name one: --data.column"
    )
    shards = {"data/train-0.parquet": parquet(["x"]), "data/train-1.parquet": parquet(["x"], column="content")}
    hub.add("o/uneven", shards)
    assert read.fails("o/uneven").startswith("o/uneven/data/train-1.parquet, after row 0 cannot be read: ")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_without_text(hub: Hub, read: Reader, kind: str) -> None:
    texts: Any = ["x"] * 300 + [None]
    data = parquet(texts) if kind == "parquet" else jsonl(texts)
    hub.add("o/null_" + kind, {f"train.{kind}": data})
    place = f"o/null_{kind}/train.{kind}, {'row' if kind == 'parquet' else 'line'} 301"
    assert read.fails("o/null_" + kind) == f"{place}: column 'text' is null, not a string."


def test_undecodable_bytes_are_named(hub: Hub, read: Reader) -> None:
    hub.add("o/latin", {"train.txt": b"na\xefve words here"})
    assert read.fails("o/latin").startswith("o/latin/train.txt, byte 2: 0xef is not utf-8")
    assert read("o/latin", policy={"encoding": "latin-1"})["texts"] == ["naïve words here"]
    table = pa.table({"text": pa.array([b"fine", b"na\xefve"]).view(pa.string())})
    file = io.BytesIO()
    pq.write_table(table, file)
    hub.add("o/not_utf_8", {"train.parquet": file.getvalue()})
    assert read.fails("o/not_utf_8").startswith("o/not_utf_8/train.parquet, row 2: column 'text' is not utf-8")


def test_what_is_not_rows_of_text_is_refused(hub: Hub, read: Reader) -> None:
    hub.add("o/pictures", {"train/a.png": b"x", "train/b.png": b"x"})
    message = read.fails("o/pictures")
    assert message.startswith("o/pictures is not made of rows of text, but read by 'imagefolder' of datasets.\n")
    assert message.endswith("a.png (and 1 more)\nOf most data sets the hub keeps a copy in Parquet: --data.hub "
                            "o/pictures@refs/convert/parquet")  # fmt: skip
    hub.add("o/array", {"train.json": json.dumps([{"text": "x"}]).encode()})
    assert read.fails("o/array").startswith("o/array/train.json is one JSON array, and ")
    hub.add("o/field", {"README.md": b"---\nconfigs:\n- config_name: a\n  data_files: a.json\n  field: data\n---\n",
                        "a.json": b'{"data": [{"text": "x"}]}'})  # fmt: skip
    assert read.fails("o/field").startswith("o/field sets field = 'data', which is not followed here.\n")
    hub.add("o/empty", {"README.md": b"only words"})
    assert "doesn't contain any data files" in read.fails("o/empty")


def test_programs_are_not_run_and_the_hubs_copy_is_read(hub: Hub, read: Reader) -> None:
    copy = {"default/train/0000.parquet": parquet(["x"]), "extra/train/0000.parquet": parquet(["y"])}
    hub.add("o/program", {"program.py": b"raise SystemExit"}, branches={"refs/convert/parquet": copy})
    message = read.fails("o/program")
    assert message.startswith("o/program is made by a program of its own, and such are not run.\n")
    name = message.rpartition(" ")[2]
    assert read(name)["texts"] == ["x"]
    assert read(name, config="extra")["texts"] == ["y"]
    assert "no configuration 'no'.\nIts configurations are: default, extra." in read.fails(name, config="no")


def test_data_sets_that_are_not_to_be_had(hub: Hub, read: Reader) -> None:
    assert read.fails("o/nothing") == (
        f"There is no data set o/nothing on {hub.address}, or it is private.\nIf it is, log in: hf auth login"
    )
    hub.add("o/revision", {"train.jsonl": jsonl(["x"])})
    assert read.fails("o/revision", revision="v9") == "o/revision has no revision 'v9'."
    assert read.fails("o/revision", revision="0" * 40) == f"o/revision has no revision {'0' * 40!r}."
    hub.add("o/gated", {"train.jsonl": jsonl(["secret"]), "README.md": b"words"}, gated=True)
    for token in ("", "hf_another"):
        assert read.fails("o/gated", token=token) == (
            "o/gated is gated: its owner decides who may read it.\n"
            f"Ask for access on {hub.address}/datasets/o/gated and log in: hf auth login"
        )
    assert read("o/gated", token=TOKEN)["texts"] == ["secret"]


def failing(hub: Hub, suffix: str, what: int | str, times: float = float("inf"), after: int = 0) -> None:
    """From the request after so many for such a file on, so many fail."""
    count = 0

    def fault(request: Request) -> int | str | None:
        nonlocal count
        count += request.is_data(suffix)
        return what if request.is_data(suffix) and after < count <= after + times else None

    hub.fault = fault


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_what_fails_for_a_while_is_asked_for_again(hub: Hub, read: Reader, kind: str) -> None:
    """And what fails for good is an error: the text never ends early."""
    noise = random.Random(1)
    texts = [noise.randbytes(2000).hex() for _ in range(2600)]
    name = f"o/stumbling_{kind}"
    hub.add(name, {f"train.{kind}": parquet(texts, rows=500) if kind == "parquet" else jsonl(texts)})
    assert read(name, brief=True)["digest"] == digest(texts)
    before = sum(request.is_data(kind) for request in hub.requests) - 1
    assert before > 0
    for what in (500 if kind == "parquet" else 503, "cut"):
        failing(hub, kind, what, times=2, after=before)
        answer = read(name, brief=True)
        assert answer["digest"] == digest(texts)
        assert len(answer["said"]) == 2
        assert all(f"Retrying in {n}s [Retry {n}/5]" in said for n, said in enumerate(answer["said"], start=1))
        assert all(said.startswith(name) for said in answer["said"])
        assert answer["slept"] == 3

        failing(hub, kind, what, after=before)
        message = read.fails(name, brief=True, said=5)
        assert read.slept == 1 + 2 + 4 + 8 + 8
        assert re.match(f"{name}/train.{kind}, after (row|byte) [1-9]", message)
        assert f"the hub answers {what}" in message or ("failed (" in message and what == "cut")


def test_a_failure_before_the_text_is_no_empty_text(hub: Hub, read: Reader) -> None:
    for number, (part, said) in enumerate({"/api/": 0, "/tree/": 5, "README.md": 10}.items()):
        name = f"o/fault_{number}"
        hub.add(name, {"train.jsonl": jsonl(["x"]), "README.md": b"words"})
        hub.fault = lambda request, part=part: 500 if part in request.path else None  # type: ignore[misc]
        assert f"the hub answers 500 to {hub.address}/" in read.fails(name, said=said)


def test_other_bytes_than_the_commits_are_noticed(hub: Hub, read: Reader, real_text: str) -> None:
    for number, text in enumerate(("a few", real_text)):  # of git and of others there are different hashes
        hub.reset()
        name = f"o/swapped_{number}"
        hub.add(name, {"train.txt": text.encode()})
        assert read(name)["texts"] == [text]
        failing(hub, ".txt", "swap")
        size = len(text.encode())
        assert read.fails(name).startswith(f"{name}/train.txt: what came of it, {size} bytes, is not the file")


def test_a_silent_hub_is_not_waited_for(hub: Hub, read: Reader) -> None:
    over = threading.Event()
    hub.add("o/silent", {"train.jsonl": jsonl(["x"])})
    try:
        for part, said in {"/api/": 0, "/tree/": 5, ".jsonl": 5}.items():

            def fault(request: Request, part: str = part) -> None:
                if part in request.path:
                    over.wait()

            hub.fault = fault
            message = read.fails("o/silent", seconds=0.2, said=said)
            assert f"the connection to {hub.address} failed (" in message
    finally:
        over.set()


def test_no_hub_at_all(tmp_path: Path) -> None:
    reader = Reader(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    try:
        message = reader.fails("o/name")
        assert message.startswith("o/name: the connection to http://127.0.0.1:9 failed (")
    finally:
        reader.close()


def test_offline(tmp_path: Path) -> None:
    reader = Reader(tmp_path, HF_HUB_OFFLINE="1")
    try:
        assert "while HF_HUB_OFFLINE is set.\nUnset it" in reader.fails("o/name")
        assert "0" * 40 in reader("o/name", revision="0" * 40, limit=0)["identity"]
        assert reader.ask(None) == {"hosts": [], "changed": False, "reports": False}
    finally:
        reader.close()


def test_the_libraries_are_quiet_and_left_as_they_were(hub: Hub, read: Reader) -> None:
    """No word of theirs, no report to anyone, and nothing kept but cards. After all other tests of the reader."""
    hub.add("o/quiet", {"train.parquet": parquet(["x"]), "README.md": b"no card"})
    assert read("o/quiet")["said"] == []
    assert hub.strange == set()
    assert read.ask(None) == {"hosts": ["127.0.0.1"], "changed": False, "reports": False}
    assert read.printed == b""
    kept = [path for path in read.home.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 10_000
    names = {path.name for path in kept if path.parent.name != "blobs" and path.suffix != ".lock"}
    assert names <= {"README.md", "program.py", "CACHEDIR.TAG"}
