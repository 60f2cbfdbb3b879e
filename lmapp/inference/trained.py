"""What every checkpoint is: a network with its alphabet and its run, and texts in that alphabet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmapp.config import Config, DataConfig
from lmapp.data import corpora, encoded, sources, tasks
from lmapp.data.encoded import Alphabet, Cut, EncodedCorpus
from lmapp.data.http import without_password
from lmapp.data.tasks import Task, task_of
from lmapp.data.text import policy_of
from lmapp.errors import LmappError, UsageError
from lmapp.models import Network
from lmapp.vocabulary import Vocabulary


class Text(NamedTuple):
    """A text as a model reads it.

    Attributes:
        ids: (N,).
        name: what it is called.
        fingerprint: of its files.
        starts: (M,) the symbols at which the state is reset; None for a model that carries it on.
    """

    ids: np.ndarray
    name: str
    fingerprint: str | None
    starts: np.ndarray | None


class Trained:
    """A trained model with its vocabulary and configuration.

    Args:
        model: in evaluation mode, fp32.
        vocabulary: its alphabet.
        config: of the run that trained it.
        saved: the checkpoint's `lmapp` entry.
        path: of the checkpoint.
    """

    def __init__(
        self, model: Network, vocabulary: Vocabulary, config: Config, saved: dict[str, Any], path: Path
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.config = config
        self.saved = saved
        self.path = path
        self.policy = policy_of(config.data)

    @property
    def task(self) -> Task | None:
        """What it was trained on, if that was a task."""
        return task_of(self.config.data)

    def prepared(self, text: str) -> str:
        """A text as the training text was made: line ends, normalisation, lower case."""
        return text if self.policy.as_bytes else self.policy.apply(text)

    @property
    def step(self) -> int:
        """The training step of the checkpoint."""
        return self.saved["progress"]["step"]

    def text(
        self,
        paths: Sequence[str] = (),
        *,
        corpus: str | None = None,
        split: str | None = None,
        encoding: str | None = None,
        column: str | None = None,
        cache_dir: str | None = None,
    ) -> Text:
        """A text in this model's alphabet.

        The run's own splits are found in the cache even when the corpus is gone.

        Args:
            paths: as in training; without any, a named corpus; without that, a split of the run's own text.
            corpus: a named corpus, whole.
            split: of the run's own text: train, validation (the default) or test.
            encoding: of the paths' files; by default as in training.
            column: of rows, that holds the text; by default as in training.
            cache_dir: where encoded text is kept; by default as in the run.

        Raises:
            LmappError: the text is not there, cannot be read, or holds a character the model does not know.
        """
        data = self.config.data
        if not paths and (encoding or column):
            raise UsageError(f"--data.{'encoding' if encoding else 'column'} is an option of --data.path.")
        if encoding and self.policy.as_bytes:
            raise UsageError("--data.encoding does nothing here: the model reads bytes as they are.")
        if split and (paths or corpus):
            raise UsageError("--split is of the run's own text: other texts are read whole.")
        if not paths and not corpus:
            split = split or "validation"
            cache = Path(cache_dir or data.cache_dir)
            saved = self.saved["corpus"]
            if split not in encoded.SPLITS:
                raise UsageError(f"--split is one of {', '.join(encoded.SPLITS)}, not {split!r}.")
            # The key is the name of a directory; a stranger's may be anything.
            key = saved["key"] if re.fullmatch("[0-9a-f]+", str(saved["key"])) else "none"
            kept = encoded.load(cache / "encoded" / key, saved["fingerprint"])
            if kept is None and self.task is not None:
                kept = self._made_again(Path(cache_dir or DataConfig().cache_dir))
            if kept is None or kept.vocabulary != self.vocabulary:
                raise LmappError(
                    f"The text this model was trained on is no longer in {cache}.\nName a text: --data.path FILE."
                )
            name = (
                "the beginning of the run's stream"
                if data.streaming and split == "train"
                else f"the run's {split} split"
            )
            return Text(getattr(kept, split), name, None, self._starts(kept, split))
        if paths and corpus:
            raise UsageError("--data.path and --data.corpus exclude each other here: score one text at a time.")
        # Not where the checkpoint says: it may be a stranger's, and this writes.
        cache = Path(cache_dir or DataConfig().cache_dir)
        kept = encoded.encode(
            sources.resolve(paths or [str(corpora.fetch(str(corpus), cache))], cache_dir=cache),
            cache_dir=cache,
            policy=self.policy if encoding is None else replace(self.policy, encoding=encoding),
            separator=data.separator,
            column=column or data.column,
            cut=Cut(val_fraction=0.0),
            alphabet=Alphabet(given=self.vocabulary),
        )
        name = ", ".join(map(without_password, paths)) if paths else f"corpus {corpus}"
        return Text(kept.train, name, kept.fingerprint, self._starts(kept, "train"))

    def _made_again(self, cache: Path) -> EncodedCorpus | None:
        """The records of its task; None if they are not those that it was trained on."""
        texts = tasks.sources_of(self.config.data)
        made = encoded.encode(
            texts["text"],
            cache_dir=cache,
            policy=self.policy,
            separator="",
            column=self.config.data.column,
            validation=texts["validation"],
            cut=Cut(val_fraction=0.0),
            alphabet=Alphabet(given=self.vocabulary),
        )
        return made if made.fingerprint == self.saved["corpus"]["fingerprint"] else None

    def _starts(self, corpus: EncodedCorpus, split: str) -> np.ndarray | None:
        return corpus.starts[split] if self.config.data.reset_state else None

    def overlap(self, text: Text, paths: Sequence[str], corpus: str | None) -> str | None:
        """A warning if a text, of those paths or a named corpus, is what the model was trained on."""
        data, fingerprint = self.config.data, text.fingerprint
        if data.streaming and set(paths) & set(data.path):
            return "the model was trained on this text: this figure is too good."
        own = None if data.path or data.hub is not None or data.task is not None else data.corpus
        if (own and corpus == own) or fingerprint == self.saved["corpus"]["facts"]["text_fingerprint"]:
            return "the model was trained on most of this text: this figure is too good."
        if own and corpus and corpora.overlaps(own, corpus):
            return f"{corpus} and {own}, which the model was trained on, share text: this figure is too good."
        return None
