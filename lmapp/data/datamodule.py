"""The Lightning data module: from the configuration to encoded splits and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning

from lmapp.config import DataConfig
from lmapp.data import corpora, encoded, sources
from lmapp.data.batches import RowBatches, fit_shape
from lmapp.data.encoded import EncodedCorpus
from lmapp.errors import LmappError
from lmapp.vocabulary import Vocabulary

Progress = Callable[[int, int | None], None]


class TextDataModule(lightning.LightningDataModule):
    """A corpus as contiguous rows of characters.

    Args:
        config: the `data` section.
        progress: told (bytes done, bytes in all) while the text is encoded.
        say: told in a line what is out of the ordinary.
        whole_rows: read a row's whole text in one step, whatever `sequence_length` says.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        progress: Progress | None = None,
        say: Callable[[str], None] = lambda _: None,
        whole_rows: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.whole_rows = whole_rows
        self.progress = progress
        self.say = say
        self.corpus: EncodedCorpus | None = None
        self.batches: RowBatches | None = None

    @property
    def corpus_name(self) -> str:
        """What the text is called: the named corpus, or the first file."""
        return Path(self.config.path[0]).stem.strip("*") or "text" if self.config.path else self.config.corpus

    def setup(self, stage: str | None = None) -> None:
        """Fetch and encode the text (once: later calls find it), and lay it out in rows.

        Raises:
            LmappError: the text is not there, cannot be read or is too short.
        """
        if self.batches is not None:
            return
        self._lay_out(self._encode())

    def setup_from(self, saved: Mapping[str, Any]) -> None:
        """Open the text of a run that goes on: from the cache, else by encoding it again.

        Args:
            saved: the checkpoint's `corpus` entry.

        Raises:
            LmappError: as in `setup`, or the text is another one now.
        """
        cached = encoded.load(Path(self.config.cache_dir) / "encoded" / saved["key"], saved["fingerprint"])
        try:
            corpus = cached or self._encode()
        except LmappError as error:
            raise LmappError(
                f"{error}\nStart it in the directory the run was started in, or name its --data.cache-dir."
            ) from error
        if corpus.fingerprint != saved["fingerprint"]:
            raise LmappError(
                "The text is not the one this run was trained on: it was changed since.\n"
                "Put the old text back, or start a new run on the new one."
            )
        self._lay_out(corpus)

    def _encode(self) -> EncodedCorpus:
        config, cache = self.config, Path(self.config.cache_dir)
        files = sources.resolve(config.path) if config.path else [corpora.fetch(config.corpus, cache, self.say)]
        fallback = {"auto": None, "true": True, "false": False}[config.byte_fallback]
        return encoded.encode(
            files,
            cache_dir=cache,
            encoding=config.encoding,
            separator=config.separator,
            column=config.column,
            val_fraction=0.1 if config.val_fraction is None else config.val_fraction,
            max_val_characters=1_000_000 if config.val_fraction is None else None,
            test_fraction=config.test_fraction,
            byte_fallback=fallback,
            progress=self.progress,
        )

    def _lay_out(self, corpus: EncodedCorpus) -> None:
        config, self.corpus = self.config, corpus
        count = len(corpus.train)
        length = 1 if self.whole_rows else config.sequence_length
        rows, steps = fit_shape(count, config.batch_size, length)
        if (rows, steps) != (config.batch_size, length):
            asked, used = f"{config.batch_size} rows of {length} characters", f"{rows} × {steps} are used"
            ways = f"--data.batch-size {rows} --data.sequence-length {steps}"
            if self.whole_rows:
                asked, used, ways = f"{config.batch_size} rows", f"{rows} are used", f"--data.batch-size {rows}"
            if not config.shrink:
                raise LmappError(
                    f"The training text has {count:,} characters, too few for {asked}.\n"
                    f"Set {ways}, or allow --data.shrink true."
                )
            self.say(f"The training text has {count:,} characters, too few for {asked}: {used}.")
        self.batches = RowBatches(
            self.corpus.train,
            batch_size=rows,
            sequence_length=None if self.whole_rows else steps,
            starts_character=self.vocabulary.starts_character,
        )

    @property
    def vocabulary(self) -> Vocabulary:
        """Of the training split; known after `setup`."""
        assert self.corpus is not None
        return self.corpus.vocabulary

    def train_dataloader(self) -> RowBatches:
        """Batches of contiguous rows; sized, with a position that is saved and restored exactly."""
        assert self.batches is not None
        return self.batches
