"""A checkpoint as something to write, score and evaluate with."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from lmapp import checkpoint
from lmapp.config import Config, DataConfig, build
from lmapp.data import corpora, encoded, sources
from lmapp.errors import LmappError, UsageError
from lmapp.inference import generation
from lmapp.inference.generation import Sampling
from lmapp.models.evaluation import Score, evaluate, evaluate_cold
from lmapp.models.recurrent import RecurrentModel
from lmapp.units import perplexity
from lmapp.vocabulary import Vocabulary


class Text(NamedTuple):
    """A text as a model reads it: ids (N,), what it is called, and the fingerprint of its files."""

    ids: np.ndarray
    name: str
    fingerprint: str | None


@dataclass(frozen=True)
class TextScore:
    """What a model makes of a text.

    Attributes:
        text: the text.
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


class LanguageModel:
    """A trained model with its vocabulary and configuration.

    Args:
        model: in evaluation mode, fp32.
        vocabulary: its alphabet.
        config: of the run that trained it.
        saved: the checkpoint's `lmapp` entry.
        path: of the checkpoint.
    """

    def __init__(
        self, model: RecurrentModel, vocabulary: Vocabulary, config: Config, saved: dict[str, Any], path: Path
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.config = config
        self.saved = saved
        self.path = path

    @property
    def step(self) -> int:
        """The training step of the checkpoint."""
        return self.saved["progress"]["step"]

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
            self.model, self.vocabulary, prompt=prompt, length=length, sampling=sampling, stop=stop, seed=seed
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
            prompt=prompt,
            length=length,
            sampling=sampling,
            stop=stop,
            seed=seed,
        )

    @torch.inference_mode()
    def score(self, text: str) -> TextScore:
        """The log-probability of a text given its first character, and the surprisal of each character.

        A character that takes several symbols (byte fallback) has the sum of their losses.

        Raises:
            UsageError: the text has fewer than two characters, or one the model does not know.
        """
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
        split: str = "validation",
        cache_dir: str | None = None,
    ) -> Evaluation:
        """Loss, perplexity and bits per character of texts, with carried state and in separate windows.

        Args:
            paths: files or globs; without any, a named corpus; without that, the run's own validation split.
            corpus: a named corpus, scored whole.
            split: of the run's own text: train, validation or test.
            cache_dir: where encoded text is kept; by default as in the run.

        Raises:
            LmappError: the text is not there, cannot be read, or holds a character the model does not know.
        """
        text = self.text(paths, corpus=corpus, split=split, cache_dir=cache_dir)
        if len(text.ids) < 2:
            raise LmappError(f"There is nothing to score in {text.name}: give a text with --data.path FILE.")
        starts, sizes = self.vocabulary.starts_character, self.vocabulary.symbol_bytes
        carried = evaluate(self.model, text.ids, starts, sizes, batch_size=self.config.data.batch_size)
        cold = evaluate_cold(self.model, text.ids, starts, sizes)
        return Evaluation(text.name, carried, cold, self._overlap(corpus, text.fingerprint))

    def text(
        self,
        paths: Sequence[str] = (),
        *,
        corpus: str | None = None,
        split: str = "validation",
        cache_dir: str | None = None,
    ) -> Text:
        """A text in this model's alphabet; arguments and errors as in `evaluate`.

        The run's own splits are found in the cache even when the corpus is gone.
        """
        data = self.config.data
        if not paths and not corpus:
            cache = Path(cache_dir or data.cache_dir)
            saved = self.saved["corpus"]
            if split not in encoded.SPLITS:
                raise UsageError(f"--split is one of {', '.join(encoded.SPLITS)}, not {split!r}.")
            # The key is the name of a directory; a stranger's may be anything.
            key = saved["key"] if re.fullmatch("[0-9a-f]+", str(saved["key"])) else "none"
            kept = encoded.load(cache / "encoded" / key, saved["fingerprint"])
            if kept is None or kept.vocabulary != self.vocabulary:
                raise LmappError(
                    f"The text this model was trained on is no longer in {cache}.\nName a text: --data.path FILE."
                )
            return Text(getattr(kept, split), f"the run's {split} split", None)
        if paths and corpus:
            raise UsageError("--data.path and --data.corpus exclude each other here: score one text at a time.")
        # Not where the checkpoint says: it may be a stranger's, and this writes.
        cache = Path(cache_dir or DataConfig().cache_dir)
        files = sources.resolve(paths) if paths else [corpora.fetch(str(corpus), cache)]
        text = encoded.encode(
            files,
            cache_dir=cache,
            encoding=data.encoding,
            separator=data.separator,
            column=data.column,
            val_fraction=0.0,
            vocabulary=self.vocabulary,
        )
        return Text(text.train, ", ".join(paths) if paths else f"corpus {corpus}", text.fingerprint)

    def _overlap(self, corpus: str | None, fingerprint: str | None) -> str | None:
        own = None if self.config.data.path else self.config.data.corpus
        if (own and corpus == own) or fingerprint == self.saved["corpus"]["fingerprint"]:
            return "the model was trained on most of this text: this figure is too good."
        if own and corpus and corpora.overlaps(own, corpus):
            return f"{corpus} and {own}, which the model was trained on, share text: this figure is too good."
        return None


@dataclass(frozen=True)
class Evaluation:
    """Figures of a text: `carried` with the state carried on, `cold` for separate windows of 256 characters."""

    text: str
    carried: Score
    cold: Score
    warning: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As `lmapp evaluate --json` prints it."""
        return {
            "text": self.text,
            "characters": self.carried.characters,
            **_figures(self.carried),
            "cold": {"window": 256, "stride": 256, "characters": self.cold.characters, **_figures(self.cold)},
            **({"warning": self.warning} if self.warning else {}),
        }


def _figures(score: Score) -> dict[str, float]:
    return {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_char": score.bits_per_char,
        "bits_per_byte": score.bits_per_byte,
    }


def load(path: str | Path, *, runs_dir: str | Path = "runs", device: str = "cpu") -> LanguageModel:
    """A checkpoint, ready to use: a file, a run's directory or a run's name.

    Nothing else is needed, neither corpus nor cache, and opening a stranger's file runs nothing.

    Raises:
        UsageError: there is no such checkpoint.
        CheckpointError: it is damaged or not lmapp's.
    """
    file = checkpoint.resolve(str(path), runs_dir)
    content = checkpoint.read(file)
    saved = content["lmapp"]
    try:
        config = build(saved["config"])
        vocabulary = Vocabulary.from_json(saved["vocabulary"])
        model = RecurrentModel(len(vocabulary), **asdict(config.model))
        model.load_state_dict({k.removeprefix("model."): v for k, v in content["state_dict"].items()})
    except (KeyError, TypeError, AttributeError, RuntimeError, UsageError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise checkpoint.CheckpointError(f"{file} is no complete checkpoint of lmapp: {reason.rstrip('.')}.") from None
    return LanguageModel(model.to(device).eval(), vocabulary, config, saved, file)
