"""Restoring masked characters: the one the model is surest of first, then the others given that one.

Shapes: M masked places, N ids of the text, T window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lmapp.errors import LmappError, UsageError
from lmapp.inference.generation import encode_text
from lmapp.inference.trained import Trained
from lmapp.models import InfillModel
from lmapp.models.evaluation import Score, evaluate_infill, evaluating
from lmapp.models.infill import choose_masked
from lmapp.vocabulary import Vocabulary

ROWS = 64
"""Windows read side by side."""
ALTERNATIVES = 4
"""Named for each place, beside the character chosen."""


@dataclass(frozen=True)
class Restored:
    """One masked place.

    Attributes:
        position: of the place in the text, in characters from 0.
        character: the likeliest one.
        probability: its, among whole characters, when it was chosen.
        alternatives: the next likeliest characters and their probabilities.
    """

    position: int
    character: str
    probability: float
    alternatives: list[tuple[str, float]]


@dataclass(frozen=True)
class Restoration:
    """A text without masks, and what was put in their places, in the order of the text."""

    text: str
    places: list[Restored]

    def as_dict(self) -> dict[str, Any]:
        """As `lmapp infill --json` prints it."""
        return asdict(self)


@dataclass(frozen=True)
class InfillEvaluation:
    """The loss on masked characters of a text; `score` counts those alone."""

    text: str
    score: Score
    mask_fraction: float
    window: int
    warning: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As `lmapp evaluate --json` prints it."""
        return {
            "text": self.text,
            "infill_loss": self.score.loss,
            "masked_characters": self.score.characters,
            "mask_fraction": self.mask_fraction,
            "window": self.window,
            **({"warning": self.warning} if self.warning else {}),
        }


def mask_text(text: str, fraction: float, seed: int) -> tuple[str, str]:
    """A text in which that share of the characters is masked, and the mark: the first of _, * and others not in it."""
    tokens, each = torch.zeros(1, len(text), dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    masked = choose_masked(tokens, each, fraction, torch.Generator().manual_seed(seed))[0].tolist()
    mask = _mark_for(text)
    return "".join(mask if hidden else c for c, hidden in zip(text, masked, strict=True)), mask


def _mark_for(text: str, wanted: str = "_") -> str:
    """A character that is not in the text, the wanted one if possible."""
    return next(mark for mark in chain(wanted, "*#", map(chr, count(0x2580))) if mark not in text)


def restore(model: InfillModel, vocabulary: Vocabulary, text: str, *, mask: str = "_", window: int) -> Restoration:
    """Put the likeliest character in the place of each mask, the surest one first, each choice known to the next.

    A place is seen in the middle of a window as long as those of training, or as near to it as the text's ends allow.
    Only whole characters are put there, none that the model would have to spell in bytes.

    Args:
        model: in evaluation mode or not; dropout is off.
        vocabulary: its alphabet.
        text: the text.
        mask: the character that marks a place.
        window: T.

    Raises:
        UsageError: there is no text, no mask in it, a mask that is not one character, or an unknown character.
        LmappError: the network's output is not finite.
    """
    if len(mask) != 1:
        raise UsageError(f"--mask is one character, not {mask!r}.")
    if not text:
        raise UsageError("There is no text to restore.")
    if mask not in text:
        raise UsageError(
            f"The text has no {mask!r}: put one in the place of each missing character, or name your mark with --mask."
        )
    ids = np.array(encode_text(vocabulary, text.replace(mask, vocabulary.characters[0]), "text"))
    positions = [position for position, character in enumerate(text) if character == mask]
    places = np.flatnonzero(vocabulary.starts_character[ids])[positions]
    ids[places] = model.mask_symbol
    width = min(window, len(ids))
    firsts = np.clip(places - width // 2, 0, len(ids) - width)
    beliefs = torch.zeros(len(places), len(vocabulary.characters), dtype=torch.float64)
    restored: dict[int, Restored] = {}
    stale, left = np.arange(len(places)), np.ones(len(places), dtype=bool)
    with evaluating(model):
        while left.any():
            for some in (stale[start : start + ROWS] for start in range(0, len(stale), ROWS)):
                windows = ids[firsts[some, None] + np.arange(width)]
                beliefs[some] = _beliefs(model, windows, places[some] - firsts[some], beliefs.shape[1])
            surest = int(torch.where(torch.from_numpy(left), beliefs.amax(1), -1.0).argmax())
            chosen = _restored(positions[surest], beliefs[surest], vocabulary)
            restored[surest] = chosen
            ids[places[surest]] = vocabulary.characters.index(chosen.character)
            left[surest] = False
            near = (firsts <= places[surest]) & (places[surest] < firsts + width)
            stale = np.flatnonzero(left & near)
    found = [restored[number] for number in range(len(places))]
    characters = list(text)
    for place in found:
        characters[place.position] = place.character
    return Restoration("".join(characters), found)


def _beliefs(model: InfillModel, windows: np.ndarray, places: np.ndarray, characters: int) -> Tensor:
    """The distribution over the first `characters` symbols at one place of each window (M, T): (M, …), fp64."""
    logits = model(torch.from_numpy(windows).to(model.head.weight.device))[range(len(places)), places, :characters]
    if not bool(logits.isfinite().all()):
        raise LmappError("The network's output is not finite: it cannot restore.")
    return logits.cpu().double().softmax(-1)


def _restored(position: int, beliefs: Tensor, vocabulary: Vocabulary) -> Restored:
    values, order = (ranked[: 1 + ALTERNATIVES].tolist() for ranked in beliefs.sort(descending=True, stable=True))
    first, *others = zip((vocabulary.characters[symbol] for symbol in order), values, strict=True)
    return Restored(position, *first, others)


class Restorer(Trained):
    """A trained infill model: it restores masked characters and has no next character to predict."""

    model: InfillModel

    @property
    def window(self) -> int:
        """T, the characters it was trained on at a time."""
        return self.saved["plan"]["sequence_length"]

    def infill(self, text: str, mask: str = "_") -> Restoration:
        """The text with the likeliest character in the place of each mask; see `restore`.

        Raises:
            UsageError: there is no text, no mask in it, a mask that is not one character, or an unknown character.
        """
        if len(mask) == 1 and mask in text:
            # Apart, for what is done to a text may make a mask of another character, or the reverse.
            parts = [self.prepared(part) for part in text.split(mask)]
            mask = _mark_for("".join(parts), mask)
            text = mask.join(parts)
        return restore(self.model, self.vocabulary, text, mask=mask, window=self.window)

    def evaluate(
        self,
        paths: Sequence[str] = (),
        *,
        corpus: str | None = None,
        split: str | None = None,
        encoding: str | None = None,
        column: str | None = None,
        cache_dir: str | None = None,
    ) -> InfillEvaluation:
        """The loss on masked characters of a text, under the mask that every evaluation of that text has.

        Args:
            paths: as in training; without any, a named corpus; without that, the run's own validation split.
            corpus: a named corpus, scored whole.
            split: of the run's own text: train, validation (the default) or test.
            encoding: of the paths' files; by default as in training.
            column: of rows, that holds the text; by default as in training.
            cache_dir: where encoded text is kept; by default as in the run.

        Raises:
            LmappError: the text is not there, cannot be read, or holds a character the model does not know.
        """
        text = self.text(paths, corpus=corpus, split=split, encoding=encoding, column=column, cache_dir=cache_dir)
        if len(text.ids) == 0:
            raise LmappError(f"There is nothing to restore in {text.name}: give a text with --data.path FILE.")
        share = self.config.model.mask_fraction
        score = evaluate_infill(
            self.model,
            text.ids,
            self.vocabulary.starts_character,
            self.vocabulary.symbol_bytes,
            mask_fraction=share,
            window=self.window,
            batch_size=self.config.data.batch_size,
        )
        return InfillEvaluation(text.name, score, share, self.window, self.overlap(text, paths, corpus))

    def generate(self, *arguments: Any, **options: Any) -> NoReturn:
        """What a left-to-right model does.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.path} is an infill model: it has to know the text on both sides of a character, so it can neither\n"
            "write nor score a text from left to right. To restore masked characters: lmapp infill CKPT TEXT"
        )

    stream = samples = score = complete = generate
