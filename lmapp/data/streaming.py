"""A text without a cache: windows of B rows, filled one after the other from a stream that may never end.

Shapes: B rows, T time steps, W windows of T steps in a row of the stream's window, V symbols.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmapp.data import sources
from lmapp.data.batches import Batch, RowBatches
from lmapp.data.draft import smallest_dtype
from lmapp.data.formats import Record
from lmapp.data.sources import Source
from lmapp.data.text import Reading, TextPolicy
from lmapp.errors import LmappError
from lmapp.units import count
from lmapp.vocabulary import UnknownCharacterError, Vocabulary, code_points, describe, utf8_lengths


class Stream:
    """A text that is read from its beginning again and again, or, if it cannot be, once.

    Attributes:
        policy: How bytes become text.
        once: Whether it can be read but once, as what is piped in.

    Args:
        text: Its files and the like.
        policy: How bytes become text.
        separator: What stands between two records (`sources.stream`).
        column: The field of a row that holds its text.
        seed: Of the order in which files are read, another one in each pass; None: as they are given.
        say: Told in a line of bytes that could not be decoded: when there are any, and how many in a whole pass.
    """

    def __init__(
        self,
        text: Sequence[Source],
        *,
        policy: TextPolicy,
        separator: str | None,
        column: str,
        seed: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.policy = policy
        self.say = say
        self.once = any(source.once for source in text)
        self._text = text
        self._options: dict[str, Any] = {"policy": policy, "separator": separator, "column": column}
        self._seed = seed
        self._begun: tuple[str, Iterator[str], Reading] | None = None

    def head(self, characters: int) -> tuple[str, Reading]:
        """Its first so many characters, or all there are, and what was found on the way; nothing is lost by that."""
        reading = Reading()
        rest = sources.stream(self._in_order(0), reading=reading, **self._options)
        pieces: list[str] = []
        size = 0
        while size < characters and (piece := next(rest, "")):
            pieces.append(piece)
            size += len(piece)
        head = "".join(pieces)
        if self.once:
            self._begun = head, rest, reading
        return head[:characters], replace(reading)

    def read(self, number: int) -> tuple[Iterator[str], Reading]:
        """The text of a pass over it, counted from 0, in pieces, and what is known of them."""
        if self._begun is not None:
            head, rest, reading = self._begun
            return chain([head] if head else [], rest), reading
        reading = Reading()
        return sources.stream(self._in_order(number), reading=reading, **self._options), reading

    def _in_order(self, number: int) -> list[Source]:
        order = list(self._text)
        if self._seed is not None:
            random.Random(f"{self._seed}, pass {number}").shuffle(order)
        return order


class Sample(Source):
    """The beginning of a stream, already as the policy wants it: what its alphabet is made from."""

    name = "The beginning of the stream"
    is_one_text = True

    def __init__(self, text: str, found: Reading) -> None:
        self.text = text
        self.found = found  # when it was read

    def size(self) -> None:
        """Not known."""
        return None

    def stamp(self) -> None:
        """It does not change."""
        return None

    def identity(self) -> str:
        """By its content."""
        return hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()

    def records(self, policy: TextPolicy, column: str, reading: Reading) -> Iterator[Record]:
        """One record."""
        for what in ("boms", "replaced", "skipped", "by_mark", "left_out", "left_out_count"):
            setattr(reading, what, getattr(self.found, what))
        yield self.name, True, iter([self.text] if self.text else [])


class StreamBatches:
    """Batches of windows of a stream: B rows of W·T steps each, a window's text being one contiguous piece.

    The state is carried on inside a window and initial at its beginning, as at that of an epoch, which a window is to
    whoever asks for the epoch and its length. The last symbol of a window is the first of the next, so each is
    predicted once. The stream begins again when it ends; if it cannot, the last window is shorter and its last batch
    says so.

    The position is the number of the window, the symbol of the stream's pass with which it begins, and the number of
    its batches handed out.

    Attributes:
        longest: The steps of a row, W·T.
        resets: Whether batches have a `keep`.

    Args:
        stream: The text.
        vocabulary: Its alphabet, of V symbols.
        batch_size: B.
        sequence_length: T.
        steps: W.
        reset_state: Whether the state is reset where a record begins.
    """

    def __init__(
        self,
        stream: Stream,
        vocabulary: Vocabulary,
        *,
        batch_size: int,
        sequence_length: int,
        steps: int,
        reset_state: bool,
    ) -> None:
        self.stream = stream
        self.vocabulary = vocabulary
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.longest = steps * sequence_length
        self.resets = reset_state
        self._steps = steps
        self._symbols: _Symbols | None = None
        self._place = _Place(0, 0)  # of the window's first symbol
        self._window = self._batch = self._loaded = 0
        self._over = False

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        # Lightning makes iterators that it never reads from, so the position is taken when the first batch is.
        start, self._loaded = self._loaded, 0
        if self._symbols is None:
            self._symbols = _Symbols(self.stream, self.vocabulary, self._place)
        elif self._over:
            raise _ended()
        elif self._batch and not start:
            self._symbols.drop(self.batch_size * self.longest)
            self._place = self._symbols.place
            self._window += 1
            self._batch = 0
        size = self.batch_size * self.longest + 1
        ids, starts = self._symbols.peek(size + 1)
        last = len(ids) <= size
        ids, starts = ids[:size], starts[: np.searchsorted(starts, size)]
        rows = RowBatches(
            ids,
            batch_size=min(self.batch_size, len(ids) - 1),
            sequence_length=self.sequence_length,
            starts_character=self.vocabulary.starts_character,
            # Told apart from a window without a start, since all batches have a mask or none.
            starts=starts if self.resets else None,
        )
        if start >= len(rows):
            raise _ended()
        for index in range(start, len(rows)):
            batch = rows.batch(index)
            if self.resets and batch.keep is None:
                batch = batch._replace(keep=batch.inputs.new_ones(batch.inputs.shape).float())
            self._batch = index + 1
            self._over = last and self._batch == len(rows)
            yield batch._replace(last=self._over)

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"window": self._window, "pass": self._place.number, "symbol": self._place.symbol, "batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position, by reading the stream from the beginning of its pass; what is piped in has to begin again.

        Raises:
            LmappError: if the stream is shorter than that.
        """
        self._window, self._batch = state["window"], state["batch"]
        self._place = _Place(state["pass"], state["symbol"])
        self._symbols = _Symbols(self.stream, self.vocabulary, self._place)
        self._loaded = self._batch % self._steps


def _gone(reading: Reading) -> str:
    if reading.replaced:
        return f"{count(reading.replaced, 'place')} became U+FFFD"
    return f"{count(reading.skipped, 'byte')} were left out"


def _ended() -> LmappError:
    return LmappError("The stream is at its end: there is no character left to predict.")


class _Place(NamedTuple):
    """A symbol of a pass over the stream."""

    number: int
    symbol: int


class _Symbols:
    """The symbols of one pass after the other, as many as are asked for in memory and no more than a piece besides."""

    def __init__(self, stream: Stream, vocabulary: Vocabulary, place: _Place) -> None:
        self.stream = stream
        self.vocabulary = vocabulary
        self._dtype = smallest_dtype(len(vocabulary))
        self._ids = np.empty(0, dtype=self._dtype)
        self._starts = np.empty(0, dtype=np.int64)  # of records, counted from the first symbol at hand
        self._ends: list[int] = []  # of passes, likewise
        self.place = _Place(place.number, 0)
        self._blocks = self._pass(place.number)
        self._reading_pass, self._pass_size = place.number, 0
        self._ended = False
        self.drop(place.symbol)

    def peek(self, count: int) -> tuple[NDArray[np.unsignedinteger], NDArray[np.int64]]:
        """The next symbols, and at which of them records begin. Fewer than asked for if the stream is at its end.

        Raises:
            LmappError: if there is nothing left to predict.
        """
        self._fill(count)
        if len(self._ids) < 2:
            raise _ended()
        starts = self._starts[: np.searchsorted(self._starts, count)]
        return self._ids[:count], starts

    def drop(self, count: int) -> None:
        """Pass over symbols."""
        while count:
            self._fill(min(count, 1 << 20))
            gone = min(count, len(self._ids))
            if gone == 0:
                raise LmappError(
                    "The stream is shorter than it was: the place where the run stopped is beyond its end."
                )
            self._ids = self._ids[gone:]
            self._starts = self._starts[np.searchsorted(self._starts, gone) :] - gone
            number, symbol = self.place.number, self.place.symbol + gone
            for end in self._ends:
                if end <= gone:
                    number, symbol = number + 1, gone - end
            self._ends = [end - gone for end in self._ends if end > gone]
            self.place = _Place(number, symbol)
            count -= gone

    def _fill(self, count: int) -> None:
        """Have so many symbols at hand, if there are."""
        ids, starts, size = [self._ids], [self._starts], len(self._ids)
        while size < count and not self._ended:
            block = next(self._blocks, None)
            if block is not None:
                ids.append(block[0])
                starts.append(block[1] + size)
                size += len(block[0])
                self._pass_size += len(block[0])
            elif self._pass_size == 0:
                raise LmappError("The stream holds no text.")
            elif self.stream.once:
                self._ended = True
            else:
                self._ends.append(size)
                self._reading_pass += 1
                self._pass_size = 0
                self._blocks = self._pass(self._reading_pass)
        self._ids, self._starts = np.concatenate(ids), np.concatenate(starts)

    def _pass(self, number: int) -> Iterator[tuple[NDArray[np.unsignedinteger], NDArray[np.int64]]]:
        """A pass over the stream in blocks: their symbols, and at which of them records begin."""
        pieces, reading = self.stream.read(number)
        characters, lost = 0, 0
        for piece in pieces:
            if not lost and (lost := reading.replaced + reading.skipped) and number == 0:
                self.stream.say(
                    f"The stream holds bytes that are not {self.stream.policy.encoding}; {_gone(reading)} so far."
                )
            begins = np.array(reading.record_starts, dtype=np.int64) - characters
            del reading.record_starts[:]
            if self.stream.policy.as_bytes:
                yield np.frombuffer(piece.encode("latin-1"), dtype=np.uint8), begins
            else:
                yield self._encoded(piece, begins, characters, reading)
            characters += len(piece)
            del reading.starts[:-1]
        if lost:
            self.stream.say(f"A pass over the stream has ended; in it {_gone(reading)}.")

    def _encoded(
        self, piece: str, begins: NDArray[np.int64], characters: int, reading: Reading
    ) -> tuple[NDArray[np.unsignedinteger], NDArray[np.int64]]:
        try:
            points = code_points(piece)
            ids = self.vocabulary.ids_of(points)
            if ids.min() >= 0:
                return ids.astype(self._dtype), begins
            if not self.vocabulary.byte_fallback:
                index = int(np.argmin(ids))
                raise UnknownCharacterError(piece[index], index)
        except UnknownCharacterError as error:
            where = reading.locate(characters + error.index)
            raise LmappError(
                f"{describe(error.character)} is not in the alphabet. It stands in {where}.\n"
                "Use a vocabulary with byte fallback."
            ) from error
        widths = np.where(ids < 0, utf8_lengths(points), 1)
        before = np.cumsum(widths) - widths
        return self.vocabulary.spell(ids, points).astype(self._dtype), before[begins]


Batches = RowBatches | StreamBatches
"""What training reads."""
