"""From an opened file to its records: what its name says it is packed with, and what it holds.

A record is a text file, a member of an archive, or a row. Nothing inside a record is changed but what the policy asks
for. Rows are split and read here, from our own decoder: the readers at hand guess types, take `NA` for nothing, or turn
CRLF and CR inside a text into LF.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

from lmapp.data import archives, packing
from lmapp.data.names import shown
from lmapp.data.text import Reading, TextPolicy, decode, shape
from lmapp.errors import LmappError

LONGEST_ROW = 1 << 26
"""Characters that a line of rows, or a field, may have; longer, it is a file of another kind or a quote left open."""

_MOST_ROWS = 1000  # of Parquet that are decoded at a time, if they are short

Record = tuple[str, bool, Iterator[str]]
"""What messages call the file or member, whether the record is its first, and its text in pieces, none empty."""

_SUFFIXES = {  # what a file of this suffix holds, and what it is packed with
    ".jsonl": ("jsonl", ""),
    ".ndjson": ("jsonl", ""),
    ".csv": ("csv", ""),
    ".tsv": ("tsv", ""),
    ".parquet": ("parquet", ""),
    ".zip": ("zip", ""),
    ".tar": ("tar", ""),
    ".tgz": ("tar", "gz"),
    ".tbz2": ("tar", "bz2"),
    ".tbz": ("tar", "bz2"),
    ".txz": ("tar", "xz"),
    ".tzst": ("tar", "zst"),
    ".gz": ("", "gz"),  # the name before it says what it holds
    ".bz2": ("", "bz2"),
    ".xz": ("", "xz"),
    ".lzma": ("", "xz"),
    ".zst": ("", "zst"),
    ".7z": ("7z", ""),
    ".rar": ("rar", ""),
}


class Format(NamedTuple):
    """What a file's name says about it.

    Attributes:
        holds: text, jsonl, csv, tsv, parquet, zip, tar; or a kind that cannot be read.
        packings: What it is packed with, the outermost first: gz, bz2, xz, zst.
        suffix: The end of the name that says so.
    """

    holds: str
    packings: tuple[str, ...]
    suffix: str


def format_of(path: str, name: str) -> Format:
    """The format of a file, by the suffixes of its path; text, if they say nothing else.

    Args:
        path: Where it lies, in an archive or anywhere.
        name: What messages call it.

    Raises:
        LmappError: if it is of a kind that cannot be read.
    """
    holds, packings, said = "", [], ""
    stem, suffix = os.path.splitext(path)
    while not holds and suffix.lower() in _SUFFIXES:
        holds, packed = _SUFFIXES[suffix.lower()]
        packings += [packed] if packed else []
        said = suffix + said
        stem, suffix = os.path.splitext(stem)
    if holds and holds not in _READERS:
        raise LmappError(f"{name} is an archive that is not read directly.\nUnpack it, or pack its text with gzip.")
    return Format(holds or "text", tuple(packings), said)


@dataclass(frozen=True)
class Options:
    """What is wanted of a file.

    Attributes:
        policy: How its bytes become text.
        column: The field of a row that holds its text.
        reading: What is told how far it has come.
        members: Which members of an archive (`archives.members`); None: all.
        scratch: The directory for a copy of what has to be read from any place; None: the system's own.
    """

    policy: TextPolicy
    column: str
    reading: Reading
    members: str | None = None
    scratch: Path | None = None


def records(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[Record]:
    """The records of an open file. The pieces of one have to be read before the next is asked for.

    Args:
        file: Read from where it stands to its end; from any place, if it can be (`seekable`) and its kind needs it.
        name: What messages call it.
        form: Its format.
        options: What is wanted of it.

    Raises:
        LmappError: at damage, undecodable bytes, a row without text and the like, with the place in the file.
    """
    for packed in form.packings:
        file = packing.unpacked(file, packed)
    return _READERS[form.holds](file, name, form, options)


def _text(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[Record]:
    place = f"{name} (decompressed)" if form.packings else name
    decoded = decode(packing.blocks(file, name, form.suffix), options.policy, place, options.reading)
    yield name, True, shape(decoded, options.policy)


def _zip(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[Record]:
    with packing.seekable(file, name, form.suffix, options.scratch) as archive:
        yield from _members(archive, name, form, options)


def _members(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[Record]:
    members = archives.members(file, form.holds, name, options.members, options.reading)
    for path, member in packing.guarded(members, name, form.suffix):
        full = f"{name}::{shown(path)}"
        inner = format_of(path, full)
        if inner.holds in ("zip", "tar"):
            raise LmappError(f"{full} is an archive in an archive.\nUnpack the outer one and name what it holds.")
        yield from records(member, full, inner, options)


def _rows(read: Callable[..., Iterator[str]]) -> Callable[..., Iterator[Record]]:
    """A reader of records from one of the texts of rows."""

    def reader(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[Record]:
        for number, row in enumerate(read(file, name, form, options)):
            text = options.policy.apply(row)
            yield name, number == 0, iter([text] if text else [])

    return reader


def _lines(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[str]:
    """Lines with the newline, and nothing else, that ends them."""
    place = f"{name} (decompressed)" if form.packings else name
    policy = replace(options.policy, as_bytes=False)  # that is for the texts in the rows
    number, length = 1, 0
    waiting: list[str] = []
    for piece in decode(packing.blocks(file, name, form.suffix), policy, place, options.reading):
        begin = 0
        while end := piece.find("\n", begin) + 1:
            yield "".join([*waiting, piece[begin:end]])
            begin, waiting, length, number = end, [], 0, number + 1
        waiting.append(piece[begin:])
        length += len(waiting[-1])
        if length > LONGEST_ROW:
            raise LmappError(
                f"{name}, line {number} has more than {LONGEST_ROW:,} characters, too many for a row.\n"
                f"If it is a text without rows, give it a name that does not end in {form.suffix}"
            )
    if length:
        yield "".join(waiting)


def _json_lines(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[str]:
    """The texts of JSON objects, one a line. A line of white space only is no row."""
    for number, line in enumerate(_lines(file, name, form, options), start=1):
        if not line.isspace():
            yield _text_of_object(line, options.column, f"{name}, line {number}")


def _text_of_object(line: str, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise LmappError(f"{where} is not JSON: {error.msg} (at its character {error.pos}).") from error
    except (ValueError, RecursionError) as error:
        raise LmappError(f"{where} cannot be read as JSON: {error}.") from error
    if not isinstance(row, dict):
        raise LmappError(f"{where} is not a JSON object, so it has no column {column!r}.")
    if column not in row:
        raise _no_column(where, column, list(row))
    return _checked(row[column], column, where)


def _no_column(where: str, column: str, columns: Sequence[str]) -> LmappError:
    listed = shown(", ".join(columns))[:400] or "none"
    return LmappError(f"{where} has no column {column!r}.\nIts columns are: {listed}. Name one: --data.column")


def _checked(text: object, column: str, where: str) -> str:
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


_CSV_FAULTS = {  # what the csv module says -> what that is
    "unexpected end of data": "a quote is opened and never closed",
    "field larger than field limit": f"a field has more than {LONGEST_ROW:,} characters; is a quote never closed?",
    "new-line character seen in unquoted field": "a carriage return (CR) without LF stands outside of quotes",
}


def _csv(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[str]:
    """The texts of one column, which the first row names. An empty line is no row."""
    columns: list[str] = []
    column, place = options.column, 0
    for number, row in _csv_rows(file, name, form, options):
        where = f"{name}, line {number}"
        if not columns:
            columns = row
            if column not in columns:
                raise _no_column(where, column, columns)
            if columns.count(column) > 1:
                raise LmappError(f"{where} names {columns.count(column)} columns {column!r}.\nRename all but one.")
            place = columns.index(column)
        elif len(row) != len(columns):
            raise LmappError(
                f"{where} has {len(row)} fields, and the header {len(columns)}.\n"
                'A field with delimiters or line ends in it stands in "quotes", and a quote in it is doubled.'
            )
        else:
            yield _checked(row[place], column, where)
    if not columns:
        raise LmappError(f"{name} is empty: it has no header row that names its columns.")


def _csv_rows(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not empty, and the line each begins in."""
    csv.field_size_limit(LONGEST_ROW)  # of the whole process: a reader has none of its own
    lines = _lines(file, name, form, options)
    start: list[str] = []
    for line in lines:
        start.append(line)
        if line.strip("\r\n"):
            break
    delimiter = "\t" if form.holds == "tsv" else _delimiter("".join(start[-1:]), options.column)
    reader = csv.reader(chain(start, lines), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            fault = next((meaning for said, meaning in _CSV_FAULTS.items() if said in str(error)), str(error))
            raise LmappError(f"{name}: the row that begins in line {number} cannot be read: {fault}.") from error
        if row is None:
            return
        if row:
            yield number, row


def _delimiter(header: str, column: str) -> str:
    """The comma; or what else separates the names of a header without one, if the column is among them."""
    for sign in ";\t":
        if "," not in header and column in [part.strip('"') for part in header.strip("\r\n").split(sign)]:
            return sign
    return ","


def _parquet(file: IO[bytes], name: str, form: Format, options: Options) -> Iterator[str]:
    import pyarrow

    with packing.seekable(file, name, form.suffix, options.scratch) as table:
        yield from packing.guarded(
            _parquet_rows(table, name, options.column), name, form.suffix, pyarrow.ArrowException
        )


def _parquet_rows(file: IO[bytes], name: str, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet
    import pyarrow.types as types

    table = pyarrow.parquet.ParquetFile(file, buffer_size=packing.BLOCK_BYTES, pre_buffer=False)
    schema = table.schema_arrow
    if column not in schema.names:
        raise _no_column(name, column, schema.names)
    if schema.names.count(column) > 1:
        raise LmappError(f"{name} has {schema.names.count(column)} columns {column!r}.\nRename all but one.")
    kind = values = schema.field(column).type
    if types.is_dictionary(kind):
        values = kind.value_type
    if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
        raise LmappError(f"{name}: column {column!r} is of type {kind}, not a string.")
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    row_bytes = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=0)
    rows = int(max(1, min(_MOST_ROWS, packing.BLOCK_BYTES / max(1, row_bytes))))
    number = 0
    for batch in table.iter_batches(batch_size=rows, columns=[column], use_threads=False):
        for text in batch.column(batch.schema.names.index(column)):
            number += 1
            where = f"{name}, row {number}"
            try:
                value = text.as_py()
            except UnicodeDecodeError as error:
                raise LmappError(f"{where}: column {column!r} is not utf-8 ({error.reason}).") from error
            yield _checked(value, column, where)


_READERS: dict[str, Callable[[IO[bytes], str, Format, Options], Iterator[Record]]] = {
    "text": _text,
    "jsonl": _rows(_json_lines),
    "csv": _rows(_csv),
    "tsv": _rows(_csv),
    "parquet": _rows(_parquet),
    "zip": _zip,
    "tar": _members,
}
