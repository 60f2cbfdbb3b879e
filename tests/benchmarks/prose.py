"""English prose of 65 different characters, as much as is asked for: the topics of Python's own documentation."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from pydoc_data.topics import topics

import torch
from sides import VOCABULARY
from torch import Tensor


def prose(characters: int) -> str:
    """The alphabet, in order, and then text, over and over again where it ends."""
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(character for character, _ in Counter(whole).most_common(VOCABULARY)))
    kept = set(alphabet)
    return alphabet + "".join(islice(cycle(c for c in whole if c in kept), characters - VOCABULARY))


def write_prose(directory: Path, characters: int) -> Path:
    """The text as a file."""
    path = directory / "prose.txt"
    path.write_text(prose(characters), encoding="utf-8")
    return path


def prose_rows(rows: int, length: int) -> Tensor:
    """The text as ids: (rows, length), each row a piece of its own."""
    text = prose(VOCABULARY + rows * length)
    number = {character: index for index, character in enumerate(text[:VOCABULARY])}
    return torch.tensor([number[c] for c in text[VOCABULARY:]]).view(rows, length)
