"""The Lightning data module: from the configuration to encoded splits and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning

from lmapp.config import DataConfig
from lmapp.data import corpora, encoded, sources, tasks
from lmapp.data.batches import RowBatches, fit_shape
from lmapp.data.encoded import Alphabet, Cut, EncodedCorpus, Progress
from lmapp.data.hub import HubDataset
from lmapp.data.sources import Source
from lmapp.data.streaming import Batches, Sample, Stream, StreamBatches
from lmapp.data.text import policy_of
from lmapp.errors import LmappError
from lmapp.vocabulary import Vocabulary, read_vocabulary


class TextDataModule(lightning.LightningDataModule):
    """A corpus as contiguous rows of characters.

    Args:
        config: the `data` section.
        progress: told (bytes done, bytes in all) while the text is encoded.
        say: told in a line what is out of the ordinary.
        seed: of the order in which a stream's files are read.
        whole_rows: read a row's whole text in one step, whatever `sequence_length` says; of a task a record, beyond
            which no gradient goes.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        progress: Progress | None = None,
        say: Callable[[str], None] = lambda _: None,
        seed: int = 0,
        whole_rows: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        self.whole_rows = whole_rows
        self.progress = progress
        self.say = say
        self.corpus: EncodedCorpus | None = None
        self.batches: Batches | None = None
        self._stream: Stream | None = None

    @property
    def corpus_name(self) -> str:
        """What the text is called: the named corpus, the task, the data set, or the first file."""
        config = self.config
        if config.task is not None:
            return f"{config.task}-{config.task_delay}"
        if config.path:
            return "stdin" if config.path[0] == "-" else sources.stem(config.path[0]) or "text"
        return config.corpus if config.hub is None else config.hub.partition("@")[0].rpartition("/")[2]

    @property
    def separator(self) -> str | None:
        """What stands between two records: of a task, whose records have a line end of their own, nothing."""
        return self.config.separator if self.config.task is None else ""

    def texts(self) -> dict[str, list[Source]]:
        """What is to be read: the text, and separate validation and test data, if there are any.

        Raises:
            LmappError: it is not there, or cannot be read.
        """
        config, cache = self.config, Path(self.config.cache_dir)
        text: list[Source]
        if config.task is not None:
            return tasks.sources_of(config)
        if config.hub is not None:
            text = [HubDataset(config.hub, config.hub_config, config.hub_split, say=self.say)]
        else:
            paths = config.path or [str(corpora.fetch(config.corpus, cache, self.say))]
            text = sources.resolve(paths, cache_dir=cache, once=config.streaming)
        validation, test = (
            sources.resolve(paths, cache_dir=cache) if paths else [] for paths in (config.val_path, config.test_path)
        )
        return {"text": text, "validation": validation, "test": test}

    def setup(self, stage: str | None = None, *, texts: dict[str, list[Source]] | None = None) -> None:
        """Fetch and encode the text (once: later calls find it), and lay it out in rows.

        Args:
            stage: does not matter.
            texts: what `texts` has returned already.

        Raises:
            LmappError: the text is not there, cannot be read or is too short.
        """
        if self.batches is not None:
            return
        self._lay_out(self._encode(texts or self.texts()))

    def setup_from(self, saved: Mapping[str, Any]) -> None:
        """Open the text of a run that goes on: from the cache, else by encoding it again.

        Args:
            saved: the checkpoint's `corpus` entry.

        Raises:
            LmappError: as in `setup`, or the text is another one now.
        """
        cached = encoded.load(Path(self.config.cache_dir) / "encoded" / saved["key"], saved["fingerprint"])
        if self.config.streaming:  # what is piped in may be another text now
            cached = None
        try:
            corpus = cached or self._encode(self.texts())
        except LmappError as error:
            piped = "-" in (*self.config.path, *self.config.val_path, *self.config.test_path)
            way = "Pipe the same text in again" if piped else "Start it in the directory the run was started in"
            lines = [*str(error).splitlines()[:2], f"{way}, or name its --data.cache-dir."]
            raise type(error)("\n".join(lines)) from error
        if corpus.fingerprint != saved["fingerprint"]:
            raise LmappError(
                "The text is not the one this run was trained on: it was changed since.\n"
                "Put the old text back, or start a new run on the new one."
            )
        self._lay_out(corpus)

    def _encode(self, texts: dict[str, list[Source]]) -> EncodedCorpus:
        config = self.config
        fallback = {"auto": None, "true": True, "false": False}[config.byte_fallback]
        given = None if config.alphabet in ("characters", "bytes") else read_vocabulary(config.alphabet)
        val_fraction = 0.1 if config.val_fraction is None else config.val_fraction
        if config.val_path or config.streaming or config.task is not None:
            val_fraction = 0.0
        if (task := tasks.task_of(config)) is not None:
            given = Vocabulary(task.alphabet)
        text = texts["text"]
        if config.streaming:
            self._stream = Stream(
                text,
                policy=policy_of(config),
                separator=config.separator,
                column=config.column,
                seed=self.seed if config.shuffle_files else None,
                say=self.say,
            )
            text = [Sample(*self._stream.head(config.alphabet_from))]
            fallback = fallback is not False
        return encoded.encode(
            text,
            cache_dir=Path(config.cache_dir),
            policy=policy_of(config),
            separator=self.separator,
            column=config.column,
            validation=texts["validation"],
            test=texts["test"],
            cut=Cut(
                val_fraction=val_fraction,
                max_val_characters=1_000_000 if config.val_fraction is None else None,
                test_fraction=config.test_fraction,
                at=config.split_at,
            ),
            alphabet=Alphabet(min_count=config.min_count, byte_fallback=fallback, given=given),
            progress=self.progress,
        )

    def _lay_out(self, corpus: EncodedCorpus) -> None:
        config, self.corpus = self.config, corpus
        if self._stream is not None:
            self.batches = StreamBatches(
                self._stream,
                corpus.vocabulary,
                batch_size=config.batch_size,
                sequence_length=config.sequence_length,
                steps=config.stream_steps,
                reset_state=config.reset_state,
            )
            return
        count, task = len(corpus.train), tasks.task_of(config)
        length = 1 if self.whole_rows else config.sequence_length
        if task is None:
            rows, steps = fit_shape(count, config.batch_size, length)
        else:
            length = task.record if self.whole_rows else length
            rows, steps = task.fit_shape(count, config.batch_size, length)
        if (rows, steps) != (config.batch_size, length):
            asked, used = f"{config.batch_size} rows of {length} characters", f"{rows} × {steps} are used"
            ways = f"--data.batch-size {rows} --data.sequence-length {steps}"
            if self.whole_rows and task is None:
                asked, used, ways = f"{config.batch_size} rows", f"{rows} are used", f"--data.batch-size {rows}"
            if not config.shrink:
                raise LmappError(
                    f"The training text has {count:,} characters, too few for {asked}.\n"
                    f"Set {ways}, or allow --data.shrink true."
                )
            self.say(f"The training text has {count:,} characters, too few for {asked}: {used}.")
        ids = corpus.train
        if task is not None:
            whole = rows * task.record
            if left := count % whole // task.record:
                self.say(f"{left} of the {config.task_records:,} records are left out, so that all rows are as long.")
            ids = ids[: count // whole * whole]
        self.batches = RowBatches(
            ids,
            batch_size=rows,
            sequence_length=None if self.whole_rows and task is None else steps,
            starts_character=self.vocabulary.starts_character,
            starts=corpus.starts["train"] if config.reset_state else None,
            shift=config.shift_epochs,
            scored=None if task is None else task.scored,
        )

    @property
    def vocabulary(self) -> Vocabulary:
        """Of the training split; known after `setup`."""
        assert self.corpus is not None
        return self.corpus.vocabulary

    def train_dataloader(self) -> Batches:
        """Batches of contiguous rows; sized, with a position that is saved and restored exactly."""
        assert self.batches is not None
        return self.batches
