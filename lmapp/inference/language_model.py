"""A checkpoint of a left-to-right model as something to write, score and evaluate with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn import functional

from lmapp.errors import LmappError, UsageError
from lmapp.inference import generation
from lmapp.inference.generation import Sampling
from lmapp.inference.trained import Trained
from lmapp.models import LanguageNetwork
from lmapp.models.answers import AnswerScore, evaluate_answers
from lmapp.models.evaluation import Score, evaluate, evaluate_cold
from lmapp.units import perplexity


@dataclass(frozen=True)
class TextScore:
    """What a model makes of a text.

    Attributes:
        text: the text, as the model reads it.
        surprisals: bits, one a character; the first has none (nan), it is given.
        log_probability: natural logarithm of the probability of everything after the first character.
    """

    text: str
    surprisals: list[float]
    log_probability: float

    @property
    def perplexity(self) -> float:
        """e to the mean loss in nats per character, infinite where that overflows."""
        return perplexity(-self.log_probability / (len(self.text) - 1))


class LanguageModel(Trained):
    """A trained model that predicts each character from those before it."""

    model: LanguageNetwork

    def generate(
        self,
        prompt: str = "",
        length: int = 500,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """New text after `prompt`: at most `length` characters, ended before the first stop string.

        Raises:
            UsageError: an option out of its range, or a character of the prompt that the model does not know.
        """
        sampling = Sampling(temperature, top_k, top_p)
        return "".join(self.stream(prompt, length, sampling=sampling, stop=stop, seed=seed))

    def stream(
        self, prompt: str = "", length: int = 500, *, sampling: Sampling, stop: Sequence[str] = (), seed: int = 0
    ) -> Iterator[str]:
        """The same in pieces, as they are written."""
        return generation.generate(
            self.model,
            self.vocabulary,
            prompt=self.prepared(prompt),
            length=length,
            sampling=sampling,
            stop=[self.prepared(end) for end in stop],
            seed=seed,
        )

    def samples(
        self,
        count: int,
        prompt: str = "",
        length: int = 500,
        *,
        sampling: Sampling,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[str]:
        """Several texts, written in one batch."""
        return generation.generate_samples(
            self.model,
            self.vocabulary,
            samples=count,
            prompt=self.prepared(prompt),
            length=length,
            sampling=sampling,
            stop=[self.prepared(end) for end in stop],
            seed=seed,
        )

    @torch.inference_mode()
    def score(self, text: str) -> TextScore:
        """The log-probability of a text given its first character, and the surprisal of each character.

        A character that takes several symbols (byte fallback) has the sum of their losses.

        Raises:
            UsageError: the text has fewer than two characters, or one the model does not know.
        """
        text = self.prepared(text)
        if len(text) < 2:
            raise UsageError("A text to score has at least 2 characters: the first is given, the others are predicted.")
        ids = np.array(generation.encode_text(self.vocabulary, text, "text"))
        tokens = torch.from_numpy(ids).to(next(self.model.parameters()).device)
        logits, _ = self.model(tokens[None, :-1], self.model.initial_state(1))
        losses = functional.cross_entropy(logits[0].double(), tokens[1:], reduction="none").cpu().numpy()
        character = np.cumsum(self.vocabulary.starts_character[ids]) - 1
        # The first character's own later bytes are predicted too; it is given, so they count for nothing.
        sums = np.zeros(len(text))
        np.add.at(sums, character[1:], losses)
        surprisals = [math.nan, *(float(s) / math.log(2) for s in sums[1:])]
        return TextScore(text, surprisals, -float(sums[1:].sum()))

    def evaluate(
        self,
        paths: Sequence[str] = (),
        *,
        corpus: str | None = None,
        split: str | None = None,
        encoding: str | None = None,
        column: str | None = None,
        cache_dir: str | None = None,
    ) -> Evaluation:
        """Loss, perplexity and bits per character of texts, with carried state and in separate windows.

        Of a task's own records the answers alone are scored, each record read from the initial state.

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
        if len(text.ids) < 2:
            raise LmappError(f"There is nothing to score in {text.name}: give a text with --data.path FILE.")
        starts, sizes = self.vocabulary.starts_character, self.vocabulary.symbol_bytes
        rows = self.config.data.batch_size
        if self.task is not None and not paths and not corpus:
            answers = evaluate_answers(self.model, text.ids, self.task.scored, batch_size=rows)
            return Evaluation(text.name, answers, None)
        carried = evaluate(self.model, text.ids, starts, sizes, batch_size=rows, starts=text.starts)
        cold = evaluate_cold(self.model, text.ids, starts, sizes, starts=text.starts)
        warning = self.overlap(text, paths, corpus)
        if self.task is not None:
            warning = "the model was trained on a task's answers: of this text every character is scored."
        return Evaluation(text.name, carried, cold, warning)

    def infill(self, text: str, mask: str = "_") -> NoReturn:
        """What an infill model does.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.path} reads from left to right: it does not know what follows a masked character.\n"
            "Train a model that reads both ways: lmapp train --model.kind infill"
        )


@dataclass(frozen=True)
class Evaluation:
    """Figures of a text: `carried` with the state carried on, `cold` for separate windows of 256 characters.

    Of a task `carried` is the score of its answers, and there is no other.
    """

    text: str
    carried: Score
    cold: Score | None
    warning: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As `lmapp evaluate --json` prints it."""
        figures: dict[str, Any] = {
            "text": self.text,
            "characters": self.carried.characters,
            **_figures(self.carried),
        }
        if self.cold is not None:
            figures["cold"] = {
                "window": 256,
                "stride": 256,
                "characters": self.cold.characters,
                **_figures(self.cold),
            }
        return figures | ({"warning": self.warning} if self.warning else {})


def _figures(score: Score) -> dict[str, float]:
    return {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_char": score.bits_per_char,
        "bits_per_byte": score.bits_per_byte,
        **({"accuracy": score.accuracy} if isinstance(score, AnswerScore) else {}),
    }
