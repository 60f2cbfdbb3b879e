"""From what a corpus is called to one stream of text: names become sources, and their records are joined."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from lmapp.data import formats, http, packing
from lmapp.data.files import LocalFile, Pipe, Remote, Source, StandardInput
from lmapp.data.formats import Format, Record
from lmapp.data.names import is_hidden, shown
from lmapp.data.text import Reading, TextPolicy, codec
from lmapp.errors import LmappError, UsageError

STANDARD_INPUT = "-"

# Names -> sources -----------------------------------------------------------------------------------------------------

_MEMBERS_OF = re.compile(r"(zip|tar)://(.*?)::(.+)", re.DOTALL)


def resolve(paths: Sequence[str], *, cache_dir: Path, once: bool = False) -> list[Source]:
    """The sources that names stand for, in the order given.

    A name is one of

    - a file, added as often as it is given; a file whose name has glob characters in it is found by that name first;
    - a glob (`**` descends into directories), which adds its files sorted by name, those only that are not in the
      list yet;
    - a directory, which adds all files below it like a glob. What is hidden (.name) and links to other directories are
      left out and reported when the text is read;
    - an http or https address, which is not asked for anything before its text is wanted;
    - `-`, standard input, once;
    - `zip://GLOB::PATH` or `tar://GLOB::PATH`: the members that match of the archive at a path or an address.

    `~` is the home directory.

    Args:
        paths: The names.
        cache_dir: Where copies are kept while they are read, of what can be read only once or only in order.
        once: Standard input is read but once, so no copy of it is needed.

    Raises:
        LmappError: at a missing or unreadable file, anything that is no regular file, a glob or a directory without
            files, or an archive of a kind that is not read.
        UsageError: if there is no name, no valid address, or no piped standard input.
    """
    if not paths:
        raise UsageError("No text is named.\nName a file, a directory or a glob: --data.path FILE")
    if list(paths).count(STANDARD_INPUT) > 1:
        raise UsageError("--data.path -: standard input is read once, so it can be named once.")
    sources: list[LocalFile | Remote | StandardInput | Pipe] = []
    known: set[tuple[int, int]] = set()
    for item in paths:
        chained = _MEMBERS_OF.fullmatch(item)
        if item == STANDARD_INPUT:
            sources.append(Pipe(cache_dir) if once else StandardInput(cache_dir))
        elif chained:
            sources.append(_archive(chained[1], chained[2], chained[3], cache_dir))
        elif http.is_address(item):
            sources.append(Remote(item, _form_of_address(item), None, cache_dir))
        else:
            found, named, left_out = _local(item)
            for path in found:
                identity = _checked(path)
                form = formats.format_of(str(path), shown(str(path)))
                if named or identity not in known:
                    sources.append(LocalFile(path, form, None, cache_dir))
                    known.add(identity)
            sources[-1].left_out += left_out
    return list(sources)


def _archive(kind: str, members: str, item: str, cache_dir: Path) -> LocalFile | Remote:
    """Those members of an archive that match."""
    at_address = http.is_address(item)
    form = _form_of_address(item) if at_address else formats.format_of(item, shown(item))
    if form.holds != kind:  # .epub, say, is a zip archive by another name
        form = form._replace(holds=kind, suffix=f".{kind}")
    if at_address:
        return Remote(item, form, members, cache_dir)
    path = Path(os.path.expanduser(item))
    _checked(path)
    return LocalFile(path, form, members, cache_dir)


def _form_of_address(address: str) -> Format:
    return formats.format_of(http.split(address).path, http.name_of(address))


def _local(item: str) -> tuple[list[Path], bool, list[str]]:
    """The files that a name stands for, whether it names one file, and what was left out."""
    name = os.path.expanduser(item)
    if os.path.isdir(name):
        files, left_out = _below(name)
        if not files:
            hidden = " that is not hidden" if left_out else ""
            raise LmappError(f"There is no file{hidden} in the directory {shown(item)}.")
        return files, False, left_out
    there = os.path.lexists(name)
    if not there and "://" in item:
        address = shown(http.without_password(item))
        raise LmappError(f"{address}: addresses of this kind are not read.\nDownload it and name the file.")
    if there or not any(sign in name for sign in "*?["):
        return [Path(name)], True, []
    matches = [match for match in sorted(glob.glob(name, recursive=True)) if not os.path.isdir(match)]
    if not matches:
        raise LmappError(f"No file matches {item!r}.\nIn a glob, ** descends into directories: 'DIR/**/*.txt'")
    return [Path(match) for match in matches], False, []


def _below(directory: str) -> tuple[list[Path], list[str]]:
    """All files below a directory, sorted, and what is left out."""
    files: list[str] = []
    left_out: list[str] = []

    def refuse(error: OSError) -> None:
        raise packing.unreadable(shown(str(error.filename)), error)

    for place, directories, names in os.walk(directory, onerror=refuse):
        # A link to a directory may lead back up.
        inner = [name for name in directories if not (is_hidden(name) or os.path.islink(os.path.join(place, name)))]
        here = [name for name in names if not is_hidden(name)]
        taken = {*inner, *here}
        left_out += [os.path.join(place, name) for name in (*directories, *names) if name not in taken]
        files += [os.path.join(place, name) for name in here]
        directories[:] = inner
    return sorted(map(Path, files), key=Path.as_posix), sorted(left_out)


def _checked(path: Path) -> tuple[int, int]:
    """Device and inode of a file that can be read as text."""
    name = shown(str(path))
    try:
        if path.is_dir():
            raise LmappError(f"{name} is a directory.\nName the archive in it.")
        if not path.exists():
            raise LmappError(f"{name}: no such file.")
        if not path.is_file():
            raise LmappError(
                f"{name} is not a regular file, and a text is read more than once.\n"
                "Save it to a file first, or pipe it into --data.path -"
            )
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise packing.unreadable(name, error) from error
    return status.st_dev, status.st_ino


def stem(path: str) -> str:
    """What a text is called by the name of its path: neither where it is nor of what kind. Empty if it is all glob."""
    chained = _MEMBERS_OF.fullmatch(path)
    path = chained[3] if chained else path
    path = http.split(path).path if http.is_address(path) else path
    base = os.path.basename(path.rstrip("/"))
    form = formats.format_of(base, shown(base))
    base = base.removesuffix(form.suffix)
    return shown((Path(base).stem if form.holds == "text" else base).strip("*"))


# Sources -> text ------------------------------------------------------------------------------------------------------


def stream(
    sources: Sequence[Source],
    *,
    policy: TextPolicy = TextPolicy(),  # noqa: B008
    separator: str | None = None,
    column: str = "text",
    reading: Reading | None = None,
) -> Iterator[str]:
    """The text of sources in pieces, none of them empty, in bounded memory.

    Args:
        sources: What it is read from.
        policy: How bytes become text.
        separator: What is put between two records, exactly. None: as many newlines, of the kind the record before
            ends with, as it takes for one blank line to stand between them; empty records count for nothing then.
        column: The field of a row (of .jsonl, .csv, .parquet and the like) that holds its text.
        reading: Kept up to date while the text is read.

    Raises:
        LmappError: at an undecodable byte (with file, offset and a remedy), a damaged file, a row that has no text, a
            server that does not answer and the like; when the pieces are read.
        UsageError: at an unknown encoding; at once.
    """
    codec(policy.encoding)
    reading = Reading() if reading is None else reading
    return _joined(_records(sources, policy, column, reading), separator, reading)


def fingerprint(sources: Sequence[Source], policy: TextPolicy, separator: str | None, column: str) -> str:
    """A hash (64 hexadecimal digits) of the sources' identities, in order, and of the options that change their text.

    Names and places of local files do not enter it, so a corpus that has moved is the same corpus; what a suffix says
    about the format does.

    Raises:
        LmappError: if a source cannot be read.
        UsageError: at an unknown encoding.
    """
    options = asdict(policy) | {"encoding": codec(policy.encoding)}
    if policy.lowercase or policy.normalization != "none":
        options["unicode"] = unicodedata.unidata_version
    rows = not all(source.is_one_text for source in sources)
    separator = separator if rows or len(sources) > 1 else None
    parts = [options, separator, column if rows else None, *(source.identity() for source in sources)]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=32).hexdigest()


def _records(
    sources: Sequence[Source], policy: TextPolicy, column: str, reading: Reading
) -> Generator[Record, None, None]:
    for source in sources:
        yield from source.records(policy, column, reading)


def _joined(records: Generator[Record, None, None], separator: str | None, reading: Reading) -> Iterator[str]:
    tail = ""  # enough of the text handed out to see its last two line ends
    first, opens = True, False
    with closing(records):  # files and connections, however this ends
        for name, opens_file, pieces in records:
            opens |= opens_file
            head = ""
            while len(head) < 4 and (piece := next(pieces, "")):
                head += piece
            if separator is not None:
                between = "" if first else separator
            else:
                between = _blank_line(tail, head[:4]) if tail and head else ""
            first = False
            reading.records += 1
            if between:
                reading.characters += len(between)
                yield between
            if head:
                if opens:
                    reading.starts.append((name, reading.characters))
                reading.record_starts.append(reading.characters)
                opens = False
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
