"""Data sets of the Hugging Face hub, read as a stream: what is wanted of them is fetched while it is read, never kept.

`datasets` finds a data set's configurations, splits and files, and streams the formats that hold strings as such
(Parquet, Arrow). Three of its readers change text: JSON's takes what looks like a date for one, CSV's takes `NA` and
`null` for nothing, plain text's turns CRLF and CR into LF. So files of these kinds are fetched from where `datasets`
finds them, and read like files of this machine.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import cached_property
from io import BufferedReader, RawIOBase
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from lmapp.data import formats
from lmapp.data.formats import Record
from lmapp.data.names import shown
from lmapp.data.sources import Source
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError, UsageError

if TYPE_CHECKING:
    from datasets import DatasetBuilder
    from huggingface_hub import HfFileSystem

SECONDS = 10
"""The longest the hub may say nothing. What does not come is asked for five times more, with 23 s of waiting."""

ROWS = 256
"""Rows that are decoded at a time."""

_FETCHED_BYTES = 1 << 22  # of a file at a time
_BUFFER_BYTES = 1 << 20  # of a column
_LISTED = 20  # names in a message

_COLUMNAR = {"parquet", "arrow"}
_OTHERS = {"json": "jsonl", "csv": "csv", "text": "text"}  # datasets' readers that are replaced, by which formats
_DELIMITERS = {",": "csv", ";": "csv", "\t": "tsv"}
# What a data set may ask of those readers: it is followed here, or makes no difference.
_KNOWN = {"encoding", "sep", "delimiter", "features", "sample_by", "keep_linebreaks", "chunksize"}

_COMMIT = re.compile("[0-9a-f]{40}")
_NAME = re.compile(r"([\w.-]+/)?[\w.-]+", re.ASCII)
_CONVERTED = "refs/convert/"  # the hub's own copies in other formats, with a directory for each configuration


class _Piece(NamedTuple):
    """A file of a split: its path in the repository, its place as fsspec writes it, its size in bytes, its hash."""

    path: str
    place: str
    size: int
    digest: str


class _Layout(NamedTuple):
    """What reads a configuration, and each split that is wanted with its files in order."""

    builder: DatasetBuilder
    splits: list[tuple[str, list[_Piece]]]


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


class HubDataset(Source):
    """The rows of a data set on the hub, in order.

    Nothing is asked of the hub before a method is called. The rows are those of the commit that `identity` names, also
    if the data set changes in between.

    Args:
        name: OWNER/NAME, or OWNER/NAME@REVISION.
        config: Which of its configurations; None: the only one, or the one it declares its default.
        split: Which of its splits, or several: train+test.
        revision: A branch, tag or commit; None: main.
        say: Told when the hub does not answer and is asked again.

    Raises:
        UsageError: if `name` cannot be a data set's, or `split` asks for a part of a split.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        say: Callable[[str], None] = _tell,
    ) -> None:
        name, _, named = name.partition("@")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--data.hub: {shown(name)!r} is not the name of a data set.\n"
                "It is written OWNER/NAME, as in the address of its page: https://huggingface.co/datasets/OWNER/NAME"
            )
        if re.search(r"[\[\]%:]", split):
            raise UsageError(
                f"--data.hub-split: {split!r} asks for a part, and where a part ends is not known of a stream.\n"
                "Name a split, or several: train+test"
            )
        self.name = name
        self.config = config
        self.splits = [part.strip() for part in split.split("+")]
        self.revision = revision or named or None
        self.say = say

    def size(self) -> int:
        """Bytes of the files as they lie on the hub, with all columns."""
        return sum(piece.size for _, pieces in self._layout.splits for piece in pieces)

    def identity(self) -> str:
        """Name, commit, configuration and splits. If the revision is a commit, nothing is asked of the hub."""
        return f"hub:{self.name}@{self._commit}:{self.config or ''}:{'+'.join(self.splits)}"

    def stamp(self) -> str:
        """The commit, whose content does not change."""
        return self._commit

    def records(self, policy: TextPolicy, column: str, reading: Reading) -> Iterator[Record]:
        """The rows; a file of plain text is one record.

        Raises:
            LmappError: if the hub cannot be reached, or fails midway; if it has no such data set, or gives no access
                to it; at a column that is not there, and at a row without text.
            UsageError: at a configuration or split that is not there.
        """
        builder, splits = self._layout
        for split, pieces in splits:
            if builder.name in _COLUMNAR:
                yield from self._streamed(split, pieces, policy, column, reading)
            else:
                for piece in pieces:
                    yield from self._fetched(piece, policy, column, reading)

    # What it is made of -----------------------------------------------------------------------------------------------

    @cached_property
    def _commit(self) -> str:
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        return self._repository.sha

    @cached_property
    def _repository(self) -> Any:
        """What the hub says of the data set: its `id`, which is another name if it was moved; its commit, `sha`."""
        with self._library():
            from huggingface_hub import HfApi

            return HfApi().dataset_info(self.name, revision=self.revision, timeout=SECONDS)

    def _load(self, function: str, **options: Any) -> Any:
        """What `datasets.load_dataset` or its like makes of the commit."""
        # hf:// says that no directory of this machine is meant, should one have this name.
        place, config, commit = f"hf://datasets/{self._repository.id}", self.config, self._commit
        if (self.revision or "").startswith(_CONVERTED):
            config, options["data_dir"] = None, self.config or "default"
        # In a cache of its own: it is for lock files only, and what the user's own one holds is of other versions.
        with TemporaryDirectory() as cache, self._library():
            import datasets

            return getattr(datasets, function)(place, config, revision=commit, cache_dir=cache, **options)

    @cached_property
    def _layout(self) -> _Layout:
        try:
            builder = self._load("load_dataset_builder")
        except LmappError as error:
            if isinstance(error.__cause__, ValueError | FileNotFoundError):
                self._check_config()
            raise
        found = builder.config.data_files or {}
        layout = _Layout(builder, [])
        for split in self.splits:
            if split not in found:
                raise UsageError(
                    f"--data.hub-split: {self.name} has no split {split!r}.\nIts splits are: {_listed(found)}"
                )
            layout.splits.append((split, [self._piece(place) for place in found[split]]))
        self._check_reader(layout)
        return layout

    def _check_config(self) -> None:
        """Raise if the data set has no such configuration."""
        if (self.revision or "").startswith(_CONVERTED):
            paths = [sibling.rfilename for sibling in self._repository.siblings or []]
            known, wanted = sorted({path.split("/")[0] for path in paths if "/" in path}), self.config or "default"
        else:
            with self._library():
                from datasets import get_dataset_config_names

                known = get_dataset_config_names(f"hf://datasets/{self._repository.id}", revision=self._commit)
            wanted = self.config or ""
        if wanted not in known:
            problem = f"has no configuration {self.config!r}" if self.config else "has several configurations"
            raise UsageError(
                f"--data.hub-config: {self.name} {problem}.\nIts configurations are: {_listed(known)}. Name one."
            )

    def _piece(self, place: str) -> _Piece:
        inside = f"hf://datasets/{self._repository.id}@{self._commit}/"
        if not place.startswith(inside):
            raise LmappError(
                f"{self.name} takes its text from elsewhere: {shown(place)}\nName that itself: --data.path ADDRESS"
            )
        with self._library():
            facts = self._files.info(place)
        # Of a file that git itself keeps, its hash is that of git; of others, that of the content alone.
        digest = facts["lfs"].sha256 if facts.get("lfs") else facts["blob_id"]
        return _Piece(place.removeprefix(inside), place, facts["size"], digest)

    @property
    def _files(self) -> HfFileSystem:
        import datasets
        from huggingface_hub import HfFileSystem

        # For these arguments there is one object, which knows the files already that datasets has looked for.
        return HfFileSystem(endpoint=datasets.config.HF_ENDPOINT, token=None)

    def _check_reader(self, layout: _Layout) -> None:
        """Raise if the files are not to be read as rows of strings, or in a way that is not followed here."""
        kind, options = layout.builder.name, layout.builder.config
        paths = [piece.path for _, pieces in layout.splits for piece in pieces]
        if kind in _COLUMNAR:
            return
        if kind not in _OTHERS:
            problem = f"is not made of rows of text, but read by {kind!r} of datasets"
        elif archives := [path for path in paths if re.search(r"\.(zip|tar|tgz|7z|rar)\b", path.lower())]:
            problem = f"is packed in archives ({shown(archives[0])})"
        else:
            from datasets import BuilderConfig

            usual, known = type(options)(), {field.name for field in fields(BuilderConfig)} | _KNOWN
            names = [field.name for field in fields(options) if field.name not in known]
            changed = [name for name in names if getattr(options, name) != getattr(usual, name)]
            if getattr(options, "sep", ",") not in _DELIMITERS:
                changed.append("sep")
            if not changed:
                return
            problem = f"sets {changed[0]} = {getattr(options, changed[0])!r}, which is not followed here"
        raise LmappError(
            f"{self.name} {problem}.\nName its files instead: --data.path {self._address(paths[0])}"
            + (f" (and {len(paths) - 1} more)\n" if len(paths) > 1 else "\n")
            + self._copy_in_parquet()
        )

    def _address(self, path: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._repository.id, path, repo_type="dataset", revision=self._commit)

    def _copy_in_parquet(self) -> str:
        return f"Of most data sets the hub keeps a copy in Parquet: --data.hub {self.name}@{_CONVERTED}parquet"

    # Its text ---------------------------------------------------------------------------------------------------------

    def _streamed(
        self, split: str, pieces: list[_Piece], policy: TextPolicy, column: str, reading: Reading
    ) -> Iterator[Record]:
        """The rows of columnar files, of which one column is fetched if they are Parquet."""
        builder = self._layout.builder
        with self._library():
            features = builder.as_streaming_dataset(split).features
        self._check_column(column, features)
        options: dict[str, Any] = {}
        if builder.name == "parquet":
            from pyarrow.dataset import ParquetFragmentScanOptions

            # By default it keeps all that it has read of a file.
            scan = ParquetFragmentScanOptions(use_buffered_stream=True, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            options = {"columns": [column], "batch_size": ROWS, "fragment_scan_options": scan}
        dataset = self._load("load_dataset", split=split, streaming=True, **options)
        dataset = dataset.select_columns([column]).with_format("arrow")
        for index, piece in enumerate(pieces):
            name, before, row = f"{self.name}/{shown(piece.path)}", reading.bytes, 0
            tables = dataset.shard(len(pieces), index).iter(ROWS)
            while True:
                with self._library(f"{name}, after row {row}"):
                    table = next(tables, None)
                if table is None:
                    break
                for value in table.column(column):
                    row += 1
                    text = _string(value, f"{name}, row {row}: column {column!r}")
                    reading.bytes = min(before + piece.size, reading.bytes + len(text))
                    text = policy.apply(text)
                    yield name, row == 1, iter([text] if text else [])
            reading.bytes = before + piece.size

    def _check_column(self, column: str, features: Any) -> None:
        if column not in features:
            raise LmappError(
                f"{self.name} has no column {column!r}.\nIts columns are: {_listed(features)}. Name one: --data.column"
            )
        kind = getattr(features[column], "dtype", None) or type(features[column]).__name__
        if kind not in ("string", "large_string", "string_view"):
            strings = [name for name, feature in features.items() if "string" in str(getattr(feature, "dtype", ""))]
            raise LmappError(
                f"{self.name}: column {column!r} is of type {kind}, not a string.\n"
                f"Columns of strings are: {_listed(strings)}. Name one: --data.column"
            )

    def _fetched(self, piece: _Piece, policy: TextPolicy, column: str, reading: Reading) -> Iterator[Record]:
        """The records of a file of text."""
        builder = self._layout.builder
        name, before = f"{self.name}/{shown(piece.path)}", reading.bytes
        form = formats.format_of(piece.path, name)
        holds = _OTHERS[builder.name]
        if holds == "csv":
            holds = _DELIMITERS[builder.config.sep]
        if policy.encoding == "utf-8" and (encoding := builder.config.encoding):
            policy = replace(policy, encoding=encoding)
        with self._library(name):
            file = self._files.open(piece.place, "rb", block_size=_FETCHED_BYTES)
        with file, BufferedReader(_Fetched(file, piece, reading, self, name), _FETCHED_BYTES) as content:
            if piece.path.lower().endswith(".json") and content.peek(1).lstrip()[:1] == b"[":
                raise LmappError(
                    f"{name} is one JSON array, and a JSON object in every line is meant.\n{self._copy_in_parquet()}"
                )
            options = formats.Options(policy, column, reading)
            yield from formats.records(cast(IO[bytes], content), name, form._replace(holds=holds), options)
        reading.bytes = before + piece.size

    # The libraries ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _library(self, where: str = "") -> Iterator[None]:
        """Around all that is done by the libraries: without their bars, notes and reports, and not for ever.

        Args:
            where: How far the text has been read, for the message of what goes wrong.
        """
        import datasets
        from huggingface_hub import constants, utils

        retries = {"OPEN_MAX_RETRIES": 1, "OPEN_RETRY_INTERVAL": 0, "READ_MAX_RETRIES": 1, "READ_RETRY_INTERVAL": 0}
        waits = {"READ_SERVER_UNAVAILABLE_RETRY_INTERVAL": 0, "READ_RATE_LIMIT_RETRY_INTERVAL": 0}
        with ExitStack() as held:
            # Every request is repeated by huggingface_hub; datasets would repeat that twenty times.
            for name, value in (retries | waits).items():
                held.enter_context(_set(datasets.config, f"STREAMING_{name}", value))
            # Both ask servers for what is of no use here, and wait for the answer.
            held.enter_context(_set(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False))
            constants.HF_HUB_DISABLE_TELEMETRY = True  # for good: threads that read ahead outlive this
            for bars, wish in (
                (datasets, datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS),
                (utils, constants.HF_HUB_DISABLE_PROGRESS_BARS),
            ):
                if wish is None and not bars.are_progress_bars_disabled():
                    bars.disable_progress_bars()
                    held.callback(bars.enable_progress_bars)
            for logger in (logging.getLogger("datasets"), logging.getLogger("huggingface_hub")):
                held.enter_context(_set(logger, "handlers", [_Waits(f"{where or self.name}: ", self.say)]))
                held.enter_context(_set(logger, "propagate", False))
            session = utils.get_session()
            hooks = {**session.event_hooks, "request": [*session.event_hooks["request"], _limit]}
            held.enter_context(_set(session, "event_hooks", hooks))
            try:
                yield
            except LmappError:
                raise
            except Exception as error:
                raise self._failure(error, where) from error

    def _failure(self, error: Exception, where: str) -> LmappError:
        """What the user is told of something that the libraries raise."""
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import httpx

        chain = [error]
        while len(chain) < 10 and isinstance(cause := chain[-1].__cause__ or chain[-1].__context__, Exception):
            chain.append(cause)

        def raised(*kinds: type[Exception]) -> Any:
            return next((cause for cause in chain if isinstance(cause, kinds)), None)

        if raised(errors.OfflineModeIsEnabled):
            return LmappError(
                f"{self.name}: the hub is not asked for anything while HF_HUB_OFFLINE is set.\n"
                "Unset it, or train on files of this machine: --data.path FILE"
            )
        if raised(errors.GatedRepoError) or "gated dataset" in str(error):
            return LmappError(
                f"{self.name} is gated: its owner decides who may read it.\n"
                f"Ask for access on {constants.ENDPOINT}/datasets/{self.name} and log in: hf auth login"
            )
        if raised(errors.RevisionNotFoundError):
            return LmappError(f"{self.name} has no revision {self.revision or 'main'!r}.")
        if raised(errors.RepositoryNotFoundError):
            return LmappError(
                f"There is no data set {self.name} on {constants.ENDPOINT}, or it is private.\n"
                "If it is, log in: hf auth login"
            )
        answer = raised(errors.HfHubHTTPError)
        if answer is not None and answer.response is not None:
            status = answer.response.status_code
            remedy = "Log in: hf auth login" if status in (401, 403) else "Try again later." if status >= 429 else ""
            message = f"{where or self.name}: the hub answers {status} to {answer.response.url}\n{remedy}"
            return LmappError(message.rstrip())
        lost = raised(httpx.RequestError) or raised(ConnectionError, TimeoutError)
        if lost is not None:
            return LmappError(
                f"{where or self.name}: the connection to {constants.ENDPOINT} failed ({_line(lost)}).\n"
                "Check the network and try again."
            )
        if "scripts are no longer supported" in str(error):
            return LmappError(
                f"{self.name} is made by a program of its own, and such are not run.\n{self._copy_in_parquet()}"
            )
        return LmappError(f"{where or self.name} cannot be read: {_line(error)}.")


class _Fetched(RawIOBase):
    """A file of the hub, read from its beginning to its end and found to be the one of the commit."""

    def __init__(self, file: IO[bytes], piece: _Piece, reading: Reading, dataset: HubDataset, name: str) -> None:
        self._file, self._piece, self._reading, self._dataset, self._name = file, piece, reading, dataset, name
        self._size = 0
        of_git = len(piece.digest) == 40
        self._hash = hashlib.sha1(b"blob %d\0" % piece.size, usedforsecurity=False) if of_git else hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._dataset._library(f"{self._name}, after byte {self._size}"):
            data = self._file.read(len(buffer))
        self._size += len(data)
        self._hash.update(data)
        if not data and (self._size, self._hash.hexdigest()) != (self._piece.size, self._piece.digest):
            raise LmappError(
                f"{self._name}: what came of it, {self._size} bytes, is not the file ({self._piece.size} bytes).\n"
                "Try again."
            )
        self._reading.bytes += len(data)
        buffer[: len(data)] = data
        return len(data)


class _Waits(logging.Handler):
    """Says when the hub is asked again, and nothing else."""

    def __init__(self, prefix: str, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.prefix, self.say, self.problem = prefix, say, ""

    def emit(self, record: logging.LogRecord) -> None:
        problem, thrown, _ = record.getMessage().partition(" thrown while requesting ")
        if thrown:
            self.problem = problem
        elif problem.startswith(("Retrying", "Rate limited")):
            self.say(f"{self.prefix}{self.problem}. {problem}")


def _limit(request: Any) -> None:
    """Give a request that would wait for ever, as those for lists of files would, the usual limit."""
    limits = request.extensions.get("timeout", {})
    parts = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {part: SECONDS if limits.get(part) is None else limits[part] for part in parts}


@contextmanager
def _set(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _string(value: Any, where: str) -> str:
    """The string of a value of Arrow."""
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise LmappError(f"{where} is not utf-8 ({error.reason}).") from error
    if text is None:
        raise LmappError(f"{where} is null, not a string.")
    return text


def _line(error: BaseException) -> str:
    """An error's message in one line."""
    return shown(" ".join(str(error).split())[:200]).rstrip(".") or type(error).__name__


def _listed(names: Iterable[str]) -> str:
    """Names as a message lists them."""
    names = list(names)
    more = f" … ({len(names)} in all)" if len(names) > _LISTED else ""
    return (shown(", ".join(map(str, names[:_LISTED]))) or "none") + more
