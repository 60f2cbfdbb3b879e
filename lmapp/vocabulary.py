"""Characters or bytes <-> ids, kept as a tokenizers file.

Shapes: V symbols, N ids. A symbol is a character of the alphabet or, with byte fallback, one of the 256 byte values, of
which a character outside the alphabet takes as many as its UTF-8 form has.
"""

from __future__ import annotations

import codecs
import json
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmapp.errors import LmappError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_SYMBOLS = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""How a tokenizers file spells the byte symbols. Text that spells the same is six ordinary characters."""


class UnknownCharacterError(LmappError):
    """A character that is not in the alphabet, and no byte fallback to write it with.

    Attributes:
        character: The character.
        index: Its position in the text, counted in characters from 0.
    """

    def __init__(self, character: str, index: int, reason: str = "is not in the vocabulary") -> None:
        super().__init__(f"Character {describe(character)} at position {index:,} {reason}.")
        self.character = character
        self.index = index


def describe(character: str) -> str:
    """A character as an error message shows it: itself where it prints, and its code point."""
    point = f"U+{ord(character):04X}"
    return f"{character!r} ({point})" if character.isprintable() else point


def code_points(text: str) -> NDArray[np.uint32]:
    """The text's code points, (N,).

    Raises:
        UnknownCharacterError: at a lone surrogate, which is half a character and has no UTF-8 form.
    """
    try:
        return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    except UnicodeEncodeError as error:
        raise UnknownCharacterError(text[error.start], error.start, "is a lone surrogate, not a character") from None


class Vocabulary:
    """An alphabet of V symbols: the characters, sorted by code point, then 256 byte symbols if `byte_fallback`.

    Args:
        characters: The alphabet: distinct characters in the order of their code points; may be empty only with
            byte fallback, which makes a vocabulary of bytes.
        byte_fallback: Whether a character outside the alphabet is written as its UTF-8 bytes (ids n to n + 255 for an
            alphabet of n characters) or is an error.

    Raises:
        ValueError: if the characters are not distinct, sorted and free of surrogates, or if there is no symbol at all.
    """

    def __init__(self, characters: str, byte_fallback: bool = False) -> None:
        if not characters and not byte_fallback:
            raise ValueError("a vocabulary needs a character, or byte fallback")
        if any(a >= b for a, b in pairwise(characters)):
            raise ValueError("a vocabulary's characters must be distinct and sorted by code point")
        if any("\ud800" <= character <= "\udfff" for character in characters):
            raise ValueError("a surrogate is not a character")
        self.characters = characters
        self.byte_fallback = bool(byte_fallback)

    def __len__(self) -> int:
        return len(self.characters) + 256 * self.byte_fallback

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return (self.characters, self.byte_fallback) == (other.characters, other.byte_fallback)

    def __hash__(self) -> int:
        return hash((self.characters, self.byte_fallback))

    def __repr__(self) -> str:
        return f"Vocabulary({self.characters!r}, byte_fallback={self.byte_fallback})"

    @cached_property
    def _points(self) -> NDArray[np.uint32]:
        return code_points(self.characters)

    @cached_property
    def _table(self) -> NDArray[np.int32]:
        table = np.full(int(self._points[-1]) + 1 if len(self._points) else 1, -1, dtype=np.int32)
        table[self._points] = np.arange(len(self._points), dtype=np.int32)
        return table

    @cached_property
    def starts_character(self) -> NDArray[np.bool_]:
        """(V,): False for the continuation bytes 0x80–0xBF only, so that its sum over symbols counts characters."""
        starts = np.ones(len(self), dtype=np.bool_)
        if self.byte_fallback:
            starts[len(self.characters) + 0x80 : len(self.characters) + 0xC0] = False
        return starts

    @cached_property
    def symbol_bytes(self) -> NDArray[np.int64]:
        """(V,): how many bytes of UTF-8 each symbol stands for."""
        return np.concatenate([utf8_lengths(self._points), np.ones(256 * self.byte_fallback, dtype=np.int64)])

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids (N,) of a text; N is its length in characters, more where characters fall back to bytes.

        Raises:
            UnknownCharacterError: at the first character outside the alphabet without byte fallback, and at a lone
                surrogate always.
        """
        points = code_points(text)
        ids = self.ids_of(points)
        if len(ids) and ids.min() < 0:
            if not self.byte_fallback:
                index = int(np.argmin(ids))
                raise UnknownCharacterError(text[index], index)
            return self.spell(ids, points)
        return ids

    def ids_of(self, points: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Ids (N,) of code points (N,), −1 for those outside the alphabet."""
        ids = self._table.take(points, mode="clip").astype(np.int64)
        ids[points >= len(self._table)] = -1
        return ids

    def spell(self, ids: NDArray[np.int64], points: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Ids (≥ N,) in which each −1 of ids (N,) has become the byte symbols of its code point."""
        unknown = ids < 0
        raw = points[unknown].astype("<u4").tobytes().decode("utf-32-le").encode()
        spelt = np.repeat(ids, np.where(unknown, utf8_lengths(points), 1))
        spelt[spelt < 0] = np.frombuffer(raw, dtype=np.uint8).astype(np.int64) + len(self.characters)
        return spelt

    def decode(self, ids: ArrayLike) -> str:
        """The text of ids (N,): runs of byte symbols are joined and decoded, invalid sequences become U+FFFD.

        Raises:
            ValueError: if an id is outside 0..V−1.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self)):
            raise ValueError(f"ids must lie in 0..{len(self) - 1}")
        n = len(self.characters)
        is_byte = ids >= n
        pieces = []
        for run in np.split(ids, np.flatnonzero(is_byte[1:] != is_byte[:-1]) + 1):
            if len(run) and run[0] >= n:
                pieces.append((run - n).astype(np.uint8).tobytes().decode("utf-8", "replace"))
            else:
                pieces.append(self._points[run].tobytes().decode("utf-32-le"))
        return "".join(pieces)

    def decoder(self) -> Decoder:
        """A decoder that takes ids one by one."""
        return Decoder(self)

    def tokenizer(self) -> Tokenizer:
        """The same alphabet as a tokenizers object, with the same ids: BPE without merges, its bytes for the unknown.

        It has no special token, because text that spells one would become it. Without byte fallback it drops a
        character outside the alphabet where `encode` raises.
        """
        from tokenizers import Tokenizer, decoders, models

        symbols = [*self.characters, *(BYTE_SYMBOLS if self.byte_fallback else ())]
        vocab = {symbol: index for index, symbol in enumerate(symbols)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=self.byte_fallback))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return tokenizer

    def to_json(self) -> str:
        """The vocabulary as the text of a tokenizers file (`tokenizer.json`)."""
        return self.tokenizer().to_str()

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """The vocabulary of a text written by `to_json`.

        Raises:
            LmappError: if the text is no such file.
        """
        try:
            return cls._from_document(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LmappError(f"This is not a vocabulary file of lmapp: {error or type(error).__name__}.") from error

    @classmethod
    def _from_document(cls, document: Any) -> Vocabulary:
        if document["added_tokens"] or document["normalizer"] or document["pre_tokenizer"]:
            raise ValueError("it changes the text before encoding it")
        model = document["model"]
        if model["type"] != "BPE" or model["merges"]:
            raise ValueError("its model is not BPE without merges")
        vocab: dict[str, int] = model["vocab"]
        symbols = sorted(vocab, key=vocab.__getitem__)
        if [vocab[symbol] for symbol in symbols] != list(range(len(symbols))):
            raise ValueError("its ids are not 0, 1, 2, …")
        byte_fallback = bool(model["byte_fallback"])
        if byte_fallback and tuple(symbols[-256:]) != BYTE_SYMBOLS:
            raise ValueError("its byte symbols are incomplete")
        characters = symbols[: len(symbols) - 256 * byte_fallback]
        if any(len(character) != 1 for character in characters):
            raise ValueError("a symbol of it is not one character")
        return cls("".join(characters), byte_fallback)


def read_vocabulary(path: str) -> Vocabulary:
    """The vocabulary of a tokenizers file.

    Raises:
        LmappError: the file is missing, or is no vocabulary of single characters and bytes.
    """
    try:
        return Vocabulary.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LmappError(
            f"The vocabulary {path} cannot be read: {error.strerror or error}.\n"
            "--data.alphabet is characters, bytes or a tokenizers file."
        ) from error
    except UnicodeDecodeError:
        raise LmappError(f"{path} is not a vocabulary file: it is no text.") from None
    except LmappError as error:
        raise LmappError(f"{path}: {error}") from error


class Decoder:
    """Text from ids given one by one; all pieces joined equal `Vocabulary.decode` of all ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._characters = vocabulary.characters
        self._size = len(vocabulary)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, symbol: int) -> str:
        """The text that is complete with this id: '' while the bytes of a character are incomplete.

        Raises:
            ValueError: if the id is outside 0..V−1.
        """
        symbol = int(symbol)
        if not 0 <= symbol < self._size:
            raise ValueError(f"ids must lie in 0..{self._size - 1}")
        if symbol < len(self._characters):
            return self.flush() + self._characters[symbol]
        return self._bytes.decode(bytes([symbol - len(self._characters)]))

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character is still incomplete, else ''."""
        return self._bytes.decode(b"", final=True)


def utf8_lengths(points: NDArray[np.uint32]) -> NDArray[np.int64]:
    """(N,): how many bytes of UTF-8 each code point takes."""
    return 1 + np.searchsorted(np.array([0x80, 0x800, 0x10000]), points, side="right").astype(np.int64)
