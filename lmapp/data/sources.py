"""Open a corpus as a stream of text.

Two ways in. Plain text, compressed or not, is read in blocks of bytes by our own incremental decoder, because the
loaders at hand turn CRLF and CR into LF, keep a BOM as a character, and cannot say at which byte decoding fails; fsspec
supplies the decompression. JSON Lines come through `datasets`, read as lines, each parsed here: its JSON reader guesses
types and hands a text that looks like a date back as another text.

A record is a text file, or a row of a JSON Lines file. Nothing inside a record is changed or added; only a byte order
mark at a file's start is no part of the text.
"""

from __future__ import annotations

import codecs
import difflib
import glob
import hashlib
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from encodings.aliases import aliases
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, cast

from lmapp.errors import LmappError, UsageError

BLOCK_BYTES = 1 << 20

_JSON_LINES = {".jsonl", ".ndjson"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".lzma"}
# Archives hold several files; fsspec would read the first only. Its zstd may end early without an error.
_UNPACK_FIRST = {".zip", ".zst", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"}

_BYTE_ORDER_MARKS = (  # UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass
class Reading:
    """How far a `stream` has come; it keeps this up to date.

    Attributes:
        bytes: Bytes read of the files as they lie on the disk.
        characters: Characters handed out.
        boms: Byte order marks removed.
        starts: Each file that has text, and the index of its first character in the stream.
    """

    bytes: int = 0
    characters: int = 0
    boms: int = 0
    starts: list[tuple[Path, int]] = field(default_factory=list)

    def locate(self, index: int) -> str:
        """Where character `index` of the stream stands: file and character within it, from 0."""
        path, start = [entry for entry in self.starts if entry[1] <= index][-1]
        return f"{path}, character {index - start:,}"


def resolve(paths: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, in the order given.

    A path names one file, as often as it is given. A glob (`**` descends) adds its files sorted by name, those only
    that are not in the list yet. A file whose name has glob characters in it is found by that name first. `~` is
    the home directory.

    Raises:
        LmappError: at a missing or unreadable file, a directory, anything that is no regular file, a glob that matches
            no file, or an archive.
        UsageError: if `paths` is empty.
    """
    if not paths:
        raise UsageError("No text is named.\nName a file or a glob: --data.path FILE")
    files: list[Path] = []
    known: set[tuple[int, int]] = set()
    for item in paths:
        name = os.path.expanduser(item)
        named = os.path.lexists(name) or not any(sign in name for sign in "*?[")
        matches = [name] if named else [m for m in sorted(glob.glob(name, recursive=True)) if not os.path.isdir(m)]
        if not matches:
            raise LmappError(f"No file matches {item!r}.\nIn a glob, ** descends into directories: 'DIR/**/*.txt'")
        for path in map(Path, matches):
            identity = _checked(path)
            if named or identity not in known:
                files.append(path)
                known.add(identity)
    return files


def _checked(path: Path) -> tuple[int, int]:
    """Device and inode of a file that can be read as text."""
    try:
        if path.is_dir():
            raise LmappError(f"{path} is a directory.\nName its files: '{path}/**/*.txt'")
        if not path.exists():
            raise LmappError(f"{path}: no such file.")
        if not path.is_file():
            raise LmappError(
                f"{path} is not a regular file, and a text is read more than once.\nSave it to a file first."
            )
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise _unreadable(path, error) from error
    if path.suffix.lower() in _UNPACK_FIRST or ".tar" in [suffix.lower() for suffix in path.suffixes]:
        raise LmappError(f"{path} is an archive that is not read directly.\nUnpack it, or pack its text with gzip.")
    return status.st_dev, status.st_ino


def _unreadable(path: Path, error: BaseException) -> LmappError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return LmappError(f"{path} cannot be read: {reason}.")


def stream(
    files: Sequence[Path],
    *,
    encoding: str = "utf-8",
    separator: str | None = None,
    column: str = "text",
    reading: Reading | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[str]:
    """The text of files in pieces, none of them empty, in bounded memory; newlines stay as they are.

    Args:
        files: Text files (also .gz, .bz2, .xz) and JSON Lines (.jsonl, .ndjson, these too compressed).
        encoding: Python's name of the files' encoding.
        separator: What is put between two records, exactly. None: as many newlines, of the kind the record before
            ends with, as it takes for one blank line to stand between them; empty records count for nothing then.
        column: The field of a JSON Lines row that holds its text.
        reading: Kept up to date while the text is read.
        block_bytes: Bytes of a plain file read at a time.

    Raises:
        LmappError: at an undecodable byte (with file, offset and a remedy), a damaged compressed file, a row that is
            not JSON or has no text; when the pieces are read.
        UsageError: at an unknown encoding; at once.
    """
    name = _codec(encoding)
    reading = Reading() if reading is None else reading
    return _joined(_records(files, name, column, reading, block_bytes), separator, reading)


def fingerprint(
    files: Sequence[Path], encoding: str = "utf-8", separator: str | None = None, column: str = "text"
) -> str:
    """A hash (64 hexadecimal digits) of the files' contents, in order, and of the options that change their text.

    Names and places of the files do not enter it, so a corpus that has moved is the same corpus; what a suffix says
    about the format does.

    Raises:
        LmappError: if a file cannot be read.
        UsageError: at an unknown encoding.
    """
    rows = any(_is_json_lines(path) for path in files)
    options = [_codec(encoding), separator if rows or len(files) > 1 else None, column if rows else None]
    digest = hashlib.blake2b(json.dumps(options).encode(), digest_size=32)
    for path in files:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(json.dumps([_compression(path), _is_json_lines(path), size]).encode())
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
        except OSError as error:
            raise _unreadable(path, error) from error
    return digest.hexdigest()


def _codec(encoding: str) -> str:
    """The encoding's one name, if it decodes bytes to text piece by piece."""
    try:
        codec = codecs.lookup(encoding)
        if codec.incrementaldecoder is not None and isinstance(codec.incrementaldecoder().decode(b"", True), str):
            return codec.name
    except (LookupError, ValueError, TypeError):
        pass
    known = sorted({*aliases, *aliases.values(), "latin-1", "utf-8", "utf-16"})
    near = difflib.get_close_matches(encoding.lower(), [name for name in known if name != encoding.lower()], n=1)
    hint = f"Did you mean {near[0]}?" if near else "Python's names are meant: utf-8, latin-1, cp1252, utf-16, gb18030 …"
    raise UsageError(f"--data.encoding: there is no text encoding {encoding!r}.\n{hint}")


def _compression(path: Path) -> str | None:
    suffix = path.suffix.lower()
    return suffix if suffix in _COMPRESSED else None


def _is_json_lines(path: Path) -> bool:
    name = path.with_suffix("") if _compression(path) else path
    return name.suffix.lower() in _JSON_LINES


def _joined(
    records: Iterable[tuple[Path, bool, Iterator[str]]], separator: str | None, reading: Reading
) -> Iterator[str]:
    tail = ""  # enough of the text handed out to see its last two line ends
    first = True
    for path, opens_file, pieces in records:
        head = ""
        while len(head) < 4 and (piece := next(pieces, "")):
            head += piece
        if separator is not None:
            between = "" if first else separator
        else:
            between = _blank_line(tail, head[:4]) if tail and head else ""
        first = False
        if between:
            reading.characters += len(between)
            yield between
        if opens_file:
            reading.starts.append((path, reading.characters))
        while head:
            reading.characters += len(head)
            tail = (tail + between + head[-4:])[-4:]
            yield head
            between, head = "", next(pieces, "")


def _blank_line(before: str, after: str) -> str:
    """The newlines that, put between two texts, leave one blank line (or what more there is) between them."""
    ending = before[len(before.rstrip("\r\n")) :]
    opening = after[: len(after) - len(after.lstrip("\r\n"))]
    newline = "\r\n" if ending.endswith("\r\n") else ending[-1:] or "\n"
    added = ""
    while len(re.findall("\r\n|\r|\n", ending + added + opening)) < 2:
        added += newline
    return added


def _records(
    files: Sequence[Path], encoding: str, column: str, reading: Reading, block_bytes: int
) -> Iterator[tuple[Path, bool, Iterator[str]]]:
    """Records as (file, whether the record is the file's first, its pieces, none empty)."""
    for path in files:
        if _is_json_lines(path):
            for number, text in enumerate(_rows(path, encoding, column, reading, block_bytes)):
                yield path, number == 0, iter([text] if text else [])
        else:
            yield path, True, _decoded(path, encoding, reading, block_bytes)


def _opened(raw: IO[bytes], path: Path) -> IO[bytes]:
    """The decompressed contents of an open file."""
    if _compression(path) is None:
        return raw
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    return cast(IO[bytes], compr[infer_compression(path.name.lower())](raw, mode="rb"))


def _decoded(path: Path, encoding: str, reading: Reading, block_bytes: int) -> Iterator[str]:
    """One file's text, piece by piece, none empty."""
    decoder = codecs.getincrementaldecoder(encoding)()
    before, fed, start, text_begun = reading.bytes, 0, b"", False
    try:
        with path.open("rb") as raw:
            file = _opened(raw, path)
            block = b"\0"
            while block:
                block = file.read(block_bytes)
                fed += len(block)
                start = start or block[:4]
                reading.bytes = before + raw.tell()
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    offset = fed - len(error.object) + error.start
                    raise _undecodable(path, encoding, error, offset, cut=not block, start=start) from error
                except UnicodeError as error:
                    raise LmappError(f"{path} is not {encoding}: {error}.") from error
                if text and not text_begun:
                    text_begun = True
                    if text[0] == "\ufeff":
                        reading.boms += 1
                        text = text[1:]
                if text:
                    yield text
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> LmappError:
    kind = _compression(path)
    if kind is None or (isinstance(error, OSError) and error.errno is not None):
        return _unreadable(path, error)
    return LmappError(f"{path} is damaged or no {kind} file: {error}.")


def _undecodable(
    path: Path, encoding: str, error: UnicodeDecodeError, offset: int, *, cut: bool, start: bytes
) -> LmappError:
    wrong = " ".join(f"0x{byte:02x}" for byte in error.object[error.start : error.end][:4])
    where = f"{path}{' (decompressed)' if _compression(path) else ''}, byte {offset}: {wrong}"
    marked = next((name for mark, name in _BYTE_ORDER_MARKS if start.startswith(mark)), None)
    if marked and not encoding.startswith(marked):
        remedy = f"It begins with the byte order mark of {marked.upper()}: try --data.encoding {marked}"
    elif cut:
        return LmappError(
            f"{where} only begins a character of {encoding}: the file is cut in the middle of a character.\n"
            "Restore its end, or take these bytes off. If it has another encoding, name it: --data.encoding latin-1"
        )
    elif encoding == "utf-8":
        remedy = "If it has another encoding, name it: --data.encoding latin-1 (Western), cp1252, gb18030 …"
    else:
        remedy = "Name the encoding that it has: --data.encoding utf-8"
    return LmappError(f"{where} is not {encoding} ({error.reason}).\n{remedy}")


def _rows(path: Path, encoding: str, column: str, reading: Reading, block_bytes: int) -> Iterator[str]:
    """The texts of a JSON Lines file's rows. A line of white space only is no row."""
    # The builder itself: `load_dataset` first reports the use of it over the network, and waits for the answer.
    from datasets.packaged_modules.text.text import Text

    before, size = reading.bytes, path.stat().st_size
    try:
        with TemporaryDirectory() as cache:  # for its lock file; streaming writes nothing else
            builder = Text(
                cache_dir=cache,
                encoding=encoding,
                chunksize=BLOCK_BYTES,
                data_files={"train": [glob.escape(str(path.absolute()))]},
            )
            lines = builder.as_streaming_dataset(split="train")
        for number, row in enumerate(lines, start=1):
            line = row["text"]
            if number == 1 and line.startswith("\ufeff"):
                reading.boms += 1
                line = line[1:]
            reading.bytes = min(before + size, reading.bytes + len(line) + 1)
            if line.strip():
                yield _text_of_row(line, column, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        for _ in _decoded(path, encoding, Reading(), block_bytes):
            pass  # reads on to the byte at fault, which it can name
        raise LmappError(f"{path} is not {encoding}: {error}.") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, error) from error
    reading.bytes = before + size


def _text_of_row(line: str, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise LmappError(f"{where} is not JSON: {error.msg} (at its character {error.pos}).") from error
    except (ValueError, RecursionError) as error:
        raise LmappError(f"{where} cannot be read as JSON: {error}.") from error
    if not isinstance(row, dict):
        raise LmappError(f"{where} is not a JSON object, so it has no column {column!r}.")
    if column not in row:
        raise LmappError(
            f"{where} has no column {column!r}.\nIts columns are: {', '.join(row) or 'none'}. Name one: --data.column"
        )
    text = row[column]
    if not isinstance(text, str):
        kind = "null" if text is None else f"a {type(text).__name__}"
        raise LmappError(f"{where}: column {column!r} is {kind}, not a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LmappError(
            f"{where}: column {column!r} has half a character (a lone surrogate) at {error.start}."
        ) from error
    return text
