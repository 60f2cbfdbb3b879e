"""What a run is made of: dataclasses that the command line, YAML files and Python share.

A field's docstring is its `--help` line, its annotation says what is allowed. `build` is the only way in from untyped
data (YAML, a dict, command-line strings), so an option means the same and is refused with the same words everywhere.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lmapp.errors import LmappError, UsageError


@dataclass(frozen=True)
class Bounds:
    """The range a number may lie in: `low` ≤ x ≤ `high`; `open_low` excludes `low`, `open_high` excludes `high`."""

    low: float = float("-inf")
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        parts = []
        if self.low != float("-inf"):
            parts.append(f"{'more than' if self.open_low else 'at least'} {self.low:.12g}")
        if self.high != float("inf"):
            parts.append(f"{'less than' if self.open_high else 'at most'} {self.high:.12g}")
        return " and ".join(parts)


TAG_LENGTH = 64
"""Of a tag in W&B, at most."""

TASKS = {"copy": 1, "order": 10, "adding": 10, "brackets": 1}
"""The tasks, and the characters of a record after its line end up to the last that can bear on the first answer."""

BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""How true and false may be written."""

Text = Annotated[str, Bounds(low=1)]  # of its length
Count = Annotated[int, Bounds(low=1)]
Steps = Annotated[int, Bounds(low=0)]
Seed = Annotated[int, Bounds(low=0, high=2**32 - 1)]
Positive = Annotated[float, Bounds(low=0, open_low=True)]
NonNegative = Annotated[float, Bounds(low=0)]
Fraction = Annotated[float, Bounds(low=0, high=1, open_high=True)]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text and how it is cut into batches."""

    path: list[Text] = field(default_factory=list)
    """Files, directories, globs, archives, http(s) addresses or - (standard input). Without, the named corpus."""
    corpus: Text = "shakespeare"
    """A named corpus: shakespeare or tiny_shakespeare (see data/README.md)."""
    hub: Text | None = None
    """A data set on the hub instead, read as a stream: OWNER/NAME."""
    hub_config: Text | None = None
    """Which of its configurations."""
    hub_split: Text = "train"
    """Which of its splits."""
    task: Literal["copy", "order", "adding", "brackets"] | None = None
    """A made text instead, of records that ask for what lies far back: symbols to be copied, the order of two marks,
    the sum of two digits, a closing bracket. Only answers are scored; every record starts from the initial state."""
    task_delay: Count = 100
    """Steps between the last input that bears on an answer and its prediction: the lag that the gradient has to
    bridge. Where inputs lie at random places, at least so many."""
    task_length: Count = 3
    """Symbols that copy has to repeat."""
    task_records: Count = 10_000
    """Records to train on; for validation a tenth as many more, at least 100 and at most 1,000."""
    column: Text = "text"
    """The column of rows (.jsonl, .csv, .parquet, hub) that holds the text."""
    separator: str | None = None
    """Put between records (a file, a row). By default as many newlines as make one blank line."""
    reset_state: bool = False
    """Start every record from the initial state."""
    encoding: Text = "utf-8"
    """How the files' bytes are to be read. A byte order mark of UTF-16 or UTF-32 is believed under utf-8."""
    errors: Literal["strict", "replace", "skip"] = "strict"
    """Bytes that cannot be decoded end the run, become U+FFFD, or are left out; how many is said."""
    newlines: Literal["keep", "lf"] = "keep"
    """Line ends as they are, or each made one newline."""
    normalization: Literal["none", "nfc", "nfkc"] = "none"
    """Unicode normalisation of the text."""
    lowercase: bool = False
    """Make the text lower case."""
    alphabet: Text = "characters"
    """characters (of the training split), bytes, or a vocabulary to be used: a tokenizers file."""
    min_count: Count = 1
    """Write characters that training holds fewer times as bytes."""
    byte_fallback: Literal["auto", "true", "false"] = "auto"
    """Add 256 byte symbols, so that any character has a probability. auto: if a character is without a symbol."""
    val_fraction: Fraction | None = None
    """Share of the text, from its end, for validation; 0 for none. By default a tenth, at most 1,000,000 characters."""
    test_fraction: Fraction = 0.0
    """Share of the text, from its very end, kept for a final test."""
    split_at: Literal["character", "record", "file"] = "character"
    """Cut the shares off exactly, or at the next start of a record or of a file."""
    val_path: list[Text] = field(default_factory=list)
    """Separate validation data, named as in path."""
    test_path: list[Text] = field(default_factory=list)
    """Separate test data, named as in path."""
    streaming: bool = False
    """Train on the text as it is read, without encoding it first, over and over; for streams that may never end."""
    stream_steps: Count = 100
    """Steps in each window of the stream. The state is carried on inside a window."""
    alphabet_from: Annotated[int, Bounds(low=2)] = 1_000_000
    """Characters at the stream's beginning that make its alphabet; any other is written as bytes."""
    shuffle_files: bool = False
    """Read the stream's files in an order drawn anew, from the seed, for each pass."""
    batch_size: Count = 32
    """B, the rows of text read side by side."""
    sequence_length: Count = 64
    """T, the characters of each row in one step. Of a task by default exactly a record."""
    shift_epochs: bool = False
    """Cut each pass over the text into windows at other places than the one before."""
    cache_dir: Text = "data/cache"
    """Where corpora and their encoded form are kept."""
    shrink: bool = True
    """Let batch_size and sequence_length shrink, and say so, for a text too short for them; `false` refuses it."""

    @property
    def answers(self) -> int:
        """Characters of a task's answer."""
        return self.task_length if self.task == "copy" else 1

    @property
    def record(self) -> int:
        """Characters of a task's record: its line end, what bears on the answer, the delay, the answer."""
        assert self.task is not None
        return 1 + TASKS[self.task] + self.task_delay + self.answers


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    kind: Literal["recurrent", "window", "infill"] = "recurrent"
    """recurrent; window reads a fixed number of characters; infill reads both ways and restores masked characters."""
    cell: list[Text] = field(default_factory=lambda: ["gru"])
    """vanilla, lstm, gru, … (README has all), or package.module:Class; several names make a stack of them."""
    hidden_size: Annotated[int, Bounds(low=1, high=1_000_000)] = 512
    """H, the units of each layer."""
    num_layers: Annotated[int, Bounds(low=1, high=1_000)] | None = None
    """L, the layers stacked. By default one for each cell named."""
    embedding_size: Annotated[int, Bounds(low=0, high=1_000_000)] = 0
    """Width of the character embedding; 0 means one-hot."""
    activation: Literal["tanh", "relu", "sigmoid", "identity"] = "tanh"
    """Of the vanilla cell and of the window model."""
    bias: bool = True
    """Biases in cells and readout."""
    connections: Literal["plain", "residual", "dense"] = "plain"
    """residual adds a layer's input to its output; dense gives each layer all that is below it, the readout all."""
    dropout: Fraction = 0.0
    """Of each layer's output, one mask over time."""
    weight_drop: Fraction = 0.0
    """Share of each recurrent matrix's weights left out for a window."""
    zoneout: Fraction = 0.0
    """Share of the state's entries that keep their old value at a step."""
    tie_embeddings: bool = False
    """One matrix for the embedding and the readout."""
    init: Literal["orthogonal", "identity", "torch"] = "orthogonal"
    """Recurrent matrices orthogonal or the identity (both with an LSTM's forget bias at 1), or torch.nn's uniform."""
    forget_bias: Annotated[float, Bounds(low=-100, high=100)] | None = None
    """Initial bias of the gate that keeps the state: an LSTM's forget gate, a GRU's z."""
    chrono: Annotated[float, Bounds(low=2, open_low=True)] | None = None
    """T_max: the gates' initial biases are those of memories drawn uniformly between 1 and T_max − 1 steps."""
    window: Annotated[int, Bounds(low=1, high=1_000_000)] = 16
    """N, the characters that the window model reads for each prediction; it grows with them."""
    bidirectional: bool | None = None
    """Read the text both ways, as an infill model always does and no other can."""
    mask_fraction: Annotated[float, Bounds(low=0, high=1, open_low=True)] = 0.15
    """Share of the characters that an infill model is trained and validated to restore, drawn anew at every step."""

    @property
    def cells(self) -> list[str]:
        """The name of each layer's cell, from the bottom up."""
        return self.cell * (self.num_layers or 1) if len(self.cell) == 1 else list(self.cell)

    @property
    def label(self) -> str:
        """The network in a word: its kind if that has no cells, else the cells it is made of, each once."""
        if self.kind == "window":
            return self.kind
        names = list(dict.fromkeys(name.rpartition(":")[2] for name in self.cell))
        cells = "+".join(names if len(names) <= 3 else [*names[:2], f"{len(names) - 2}more"])[:40]
        return cells if self.kind == "recurrent" else f"{self.kind}-{cells}"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation and its limits. Training ends at whichever limit comes first."""

    max_steps: Count | None = None
    """Stop after so many steps."""
    max_minutes: Positive | None = None
    """Stop after so many minutes of training steps (turned into a number of steps once, after 50 of them)."""
    max_epochs: Count | None = None
    """Stop after so many passes over the text. Without any limit: 5 minutes."""
    target_accuracy: Annotated[float, Bounds(low=0, high=1, open_low=True)] | None = None
    """Stop when validation finds so large a share of a task's answers right."""
    learning_rate: Positive = 4e-3
    """Peak learning rate."""
    optimizer: Literal["adamw", "adam", "rmsprop", "sgd"] = "adamw"
    """The update rule."""
    momentum: Fraction = 0.0
    """Of sgd and rmsprop."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Of the learning rate after its warm-up."""
    warmup_steps: Steps = 100
    """Steps over which the learning rate rises from 0 to its peak."""
    weight_decay: NonNegative = 0.01
    """Of matrices; biases are left alone."""
    clip_norm: Positive | None = 1.0
    """Largest global norm of the gradient; `none` for no clipping by norm."""
    clip_value: Positive | None = None
    """Largest absolute entry of the gradient, instead of clip_norm."""
    omega: NonNegative = 0.0
    """Weight of Pascanu's Ω, which draws the gradient of vanilla cells to one length at all steps; 0 for none."""
    bptt: Literal["block", "full", "sliding", "randomised"] = "block"
    """Where the gradient through time is cut: every truncation_length steps; nowhere, a window being a row's whole
    text; so many steps before each loss; at random."""
    truncation_length: Count | None = None
    """τ, the steps that the gradient looks back. By default the sequence length."""
    stride: Count = 1
    """Of sliding: losses that look back together, τ to τ + stride − 1 steps; the cost falls with it."""
    keep_probability: Annotated[float, Bounds(low=0, high=1, open_low=True)] | None = None
    """π of randomised: the chance that the gradient passes a step. By default 1 − 1/τ."""
    carry_state: bool = True
    """Start each window from the state the row's last window ended with; `false` from zero."""
    val_every_steps: Steps = 500
    """Validate, write samples and save so often; 0 only at the end."""
    checkpoint_minutes: Positive = 2.0
    """Save at least so often."""
    max_nonfinite: Count = 10
    """Stop after so many non-finite gradients in a row."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the matrix products. auto: bf16 where the hardware has it natively."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""


@dataclass(frozen=True, kw_only=True)
class GradientsConfig:
    """The measurement of long-range gradient decay."""

    every_steps: Steps = 500
    """Measure before the first step, every so many steps and at the end; 0 turns it off."""
    max_lag: Annotated[int, Bounds(low=2)] | None = None
    """K, the longest lag. By default twice the steps that a loss looks back at most, and no more than 512."""
    windows: Count = 8
    """Windows of validation text it is measured on."""
    budget: Annotated[float, Bounds(low=0, high=1, open_low=True, open_high=True)] | None = None
    """Largest share of the training time that measuring gradient decay may take, as 0.02 for 2 %: every_steps is raised
    to keep it from then on, once 50 steps have been timed. By default there is no limit."""
    spectrum_every_steps: Steps = 2000
    """Measure spectral norm, spectral radius and Lyapunov exponent of the state's Jacobian before the first step, every
    so many steps and at the end; 0, or every_steps 0, turns it off."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Weights & Biases and the local history."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online when a key is configured, else offline."""
    project: Text = "lmapp"
    """W&B project."""
    group: Text | None = None
    """W&B group, for runs that are to be compared."""
    job_type: Text | None = None
    """W&B job type, and what `lmapp compare` calls runs that are alike but for their seed. By default the network."""
    tags: list[Text] = field(default_factory=list)
    """W&B tags."""
    notes: Text | None = None
    """W&B notes."""
    artifact: Literal["none", "best"] = "none"
    """best: give W&B the best checkpoint, as an artifact, when the run ends."""
    every_steps: Count = 20
    """Write training figures so often."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    name: Text | None = None
    """Name of the run; by default made from corpus, cell and time."""
    runs_dir: Text = "runs"
    """Where runs are kept."""
    seed: Seed = 1
    """Of the initial weights, dropout, probe windows and samples."""

    def as_dict(self) -> dict[str, Any]:
        """The whole configuration as nested dicts of primitives; one cell is its name."""
        options = asdict(self)
        if len(self.model.cell) == 1:
            options["model"]["cell"] = self.model.cell[0]
        return options


SECTIONS = tuple(name for name, hint in get_type_hints(Config).items() if is_dataclass(hint))

# Only these may change when a run goes on: they touch neither the data, nor the model, nor a step's arithmetic.
RESUMABLE = frozenset(
    {
        "train.max_steps",
        "train.max_minutes",
        "train.max_epochs",
        "train.target_accuracy",
        "train.val_every_steps",
        "train.checkpoint_minutes",
        "data.cache_dir",
        "runs_dir",
        *(f"logging.{f.name}" for f in fields(LoggingConfig)),
    }
)


def option_name(keys: Sequence[str]) -> str:
    """`("data", "batch_size")` as it is written on the command line: `--data.batch-size`."""
    return "--" + ".".join(keys).replace("_", "-")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A configuration file as nested dicts, unchecked.

    A section with nothing in it is left out.

    Raises:
        UsageError: the file is missing, unreadable, not YAML, not a mapping, or gives an option twice.
    """
    import yaml

    # A text given in place of a configuration is the likeliest mistake.
    hint = "" if Path(path).suffix in (".yaml", ".yml") else f"\nIf it is text to train on: --data.path {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        twice = _repeated(yaml.compose(text, yaml.SafeLoader))
    except FileNotFoundError:
        raise UsageError(f"There is no configuration file {path}.{hint}") from None
    except OSError as error:
        raise UsageError(f"The configuration file {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}, byte {error.start}: a configuration is UTF-8 text, this is not.{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise UsageError(f"{path}{place}: not valid YAML ({problem}).{hint}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path}: a configuration is a mapping of sections, this is a {type(content).__name__}.{hint}")
    if twice is not None:
        raise UsageError(f"{path}, line {twice.start_mark.line + 1}: {twice.value} is given twice.")
    return {key: value for key, value in content.items() if value is not None or _plain(key) not in SECTIONS}


def _repeated(node: Any) -> Any:
    """The first key of a mapping of sections that repeats one before it: YAML itself would drop the earlier."""
    seen = set()
    for key, value in node.value if node is not None and node.tag.endswith(":map") else ():
        name = _plain(key.value)
        if name in seen:
            return key
        seen.add(name)
        if name in SECTIONS and (below := _repeated(value)) is not None:
            return below
    return None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with every option of `over` put in its place; sections are merged, options replaced.

    A text that `over` names takes the place of the one that `base` names, whether files, a named corpus, one on the hub
    or a task.
    """
    base, over = _canonical(base), _canonical(over)
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = {**below, **value} if both else value  # type: ignore[dict-item]
    named = over.get("data")
    if isinstance(named, Mapping):
        texts: dict[str, Any] = {"path": [], "corpus": DataConfig().corpus, "hub": None, "task": None}
        if any(named.get(name) for name in texts):
            merged["data"] |= {name: texts[name] for name in texts.keys() & merged["data"].keys() - named.keys()}
    return merged


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options under the fields' own names: `batch-size` may be written for `batch_size`.

    Raises:
        UsageError: an option is there under both spellings.
    """
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = _plain(key)
        if name in found:
            raise UsageError(f"{name} is given twice, as {name} and as {name.replace('_', '-')}.")
        found[name] = _canonical(value) if name in SECTIONS and isinstance(value, Mapping) else value
    return found


def _plain(key: Any) -> str:
    return str(key).replace("-", "_")


def build(options: Mapping[str, Any], *, source: str | None = None) -> Config:
    """A checked Config from nested dicts; options left out keep their defaults.

    Args:
        options: `{section: {option: value}}`; values typed or as command-line strings.
        source: where the options come from, for messages (a file's name).

    Raises:
        UsageError: an unknown option (with the nearest right name) or a value that is not allowed.
    """
    options = _canonical(options)
    config = _build(Config, options, (), f"{source}: " if source else "")
    train = config.train
    if train.clip_value is not None and "clip_norm" not in options.get("train", {}):
        config = replace(config, train=replace(train, clip_norm=None))
    elif train.clip_value is not None and train.clip_norm is not None:
        raise UsageError("--train.clip-value and --train.clip-norm exclude each other: set one of them to none.")
    _check_data(config)
    if config.data.task is not None:
        config = _of_task(config, options.get("data", {}))
    data = config.data
    if (data.val_fraction or 0.0) + data.test_fraction >= 1:
        raise UsageError(
            "--data.val-fraction and --data.test-fraction leave nothing to train on: their sum must stay below 1."
        )
    if train.momentum and train.optimizer not in ("sgd", "rmsprop"):
        raise UsageError(f"--train.momentum is an option of sgd and rmsprop; --train.optimizer is {train.optimizer}.")
    if long := next((tag for tag in config.logging.tags if len(tag) > TAG_LENGTH), None):
        raise UsageError(f"--logging.tags: W&B takes tags of at most {TAG_LENGTH} characters, not {long!r}.")
    _check_model(config.model)
    _check_truncation(config)
    if config.train.omega:
        _check_omega(config)
    if config.gradients.budget is not None:
        _check_budget(config)
    return config


def _check_data(config: Config) -> None:
    """Refuse options of the text that exclude each other or that nothing would read."""
    data, unset = config.data, DataConfig()

    def changed(*names: str) -> list[str]:
        return [option_name(("data", name)) for name in names if getattr(data, name) != getattr(unset, name)]

    if data.path and data.hub is not None:
        raise UsageError("--data.path and --data.hub exclude each other: train on files or on a data set of the hub.")
    if data.task is not None:
        _check_task(config)
    elif idle := changed("task_delay", "task_length", "task_records"):
        raise UsageError(f"{idle[0]} is an option of --data.task, which names none.")
    elif config.train.target_accuracy is not None:
        raise UsageError("--train.target-accuracy is an option of --data.task: other texts have no answers.")
    if data.hub is None and (idle := changed("hub_config", "hub_split")):
        raise UsageError(f"{idle[0]} is an option of --data.hub, which names no data set.")
    if data.alphabet == "bytes":
        idle = changed("encoding", "errors", "newlines", "normalization", "lowercase", "min_count", "byte_fallback")
        if idle:
            raise UsageError(f"{idle[0]} does nothing to --data.alphabet bytes: bytes are read as they are.")
    elif data.alphabet != "characters" and (idle := changed("min_count", "byte_fallback")):
        raise UsageError(
            f"{idle[0]} does nothing to a vocabulary that is given, as by --data.alphabet {data.alphabet}."
        )
    if data.min_count > 1 and data.byte_fallback == "false":
        raise UsageError("--data.min-count writes rare characters as bytes: leave out --data.byte-fallback false.")
    if data.val_path and data.val_fraction is not None:
        raise UsageError("--data.val-path and --data.val-fraction exclude each other: one validation split is enough.")
    if data.test_path and data.test_fraction:
        raise UsageError("--data.test-path and --data.test-fraction exclude each other: one test split is enough.")
    if data.streaming:
        if idle := changed("val_fraction", "test_fraction", "split_at", "shift_epochs", "shrink"):
            raise UsageError(
                f"{idle[0]} needs to know where the text ends, which --data.streaming does not.\n"
                "Separate validation data can be given: --data.val-path FILE"
            )
        if config.train.bptt == "full" or config.train.max_epochs is not None:
            which = "--train.bptt full" if config.train.bptt == "full" else "--train.max-epochs"
            raise UsageError(f"{which} needs to know where the text ends, which --data.streaming does not.")
    elif idle := changed("stream_steps", "alphabet_from", "shuffle_files"):
        raise UsageError(f"{idle[0]} is an option of --data.streaming.")
    if data.alphabet != "characters" and (idle := changed("alphabet_from")):
        raise UsageError(f"{idle[0]} does nothing to --data.alphabet {data.alphabet}.")
    named = [*data.path, *data.val_path, *data.test_path]
    if named.count("-") > 1:
        raise UsageError("Standard input can be read once: name - once.")
    if data.alphabet == "bytes" and config.model.kind == "infill":
        raise UsageError("--data.alphabet bytes: an infill model restores characters. Use --data.byte-fallback true.")
    if data.reset_state and config.model.kind != "recurrent":
        raise UsageError(f"--data.reset-state is an option of kind recurrent; --model.kind is {config.model.kind}.")


_OPTIONS_OF_TEXTS = (
    "path",
    "corpus",
    "hub",
    "hub_config",
    "hub_split",
    "column",
    "separator",
    "encoding",
    "errors",
    "newlines",
    "normalization",
    "lowercase",
    "alphabet",
    "min_count",
    "byte_fallback",
    "val_fraction",
    "test_fraction",
    "split_at",
    "val_path",
    "test_path",
    "streaming",
    "stream_steps",
    "alphabet_from",
    "shuffle_files",
)
"""The options of a text that a task, which is made, does not read."""


def _check_task(config: Config) -> None:
    """Refuse options that a task contradicts or does not read."""
    data, unset = config.data, DataConfig()
    for name in _OPTIONS_OF_TEXTS:
        if getattr(data, name) != getattr(unset, name):
            raise UsageError(
                f"{option_name(('data', name))} and --data.task exclude each other: a task's text is made, with an "
                "alphabet and a\nvalidation split of its own."
            )
    if config.model.kind == "infill":
        raise UsageError("--data.task: an infill model reads past an answer. Use --model.kind recurrent or window.")
    if data.task != "copy" and data.task_length != unset.task_length:
        raise UsageError(f"--data.task-length is an option of --data.task copy, which is {data.task}.")
    if data.task == "copy" and data.task_delay < data.task_length:
        raise UsageError(
            f"--data.task-delay {data.task_delay} is shorter than what is to be copied, --data.task-length "
            f"{data.task_length}: the copy would begin before its end."
        )


def _of_task(config: Config, given: Mapping[str, Any]) -> Config:
    """The configuration of a task, whose records start from the initial state and are a window each unless given."""
    if "reset_state" in given and not config.data.reset_state and config.model.kind == "recurrent":
        raise UsageError("--data.reset-state false: every record of --data.task starts from the initial state.")
    data = replace(config.data, reset_state=config.model.kind == "recurrent")
    return replace(config, data=data if "sequence_length" in given else replace(data, sequence_length=data.record))


def _check_model(model: ModelConfig) -> None:
    """Refuse options of the network that exclude each other or that nothing would read."""
    if len(model.cell) > 1 and model.num_layers not in (None, len(model.cell)):
        raise UsageError(
            f"--model.cell names {len(model.cell)} layers, --model.num-layers is {model.num_layers}: set it to none."
        )
    if model.bidirectional and model.kind != "infill":
        raise UsageError(
            "--model.bidirectional: a network that reads the text both ways has read the character it is to predict, "
            "so it is\nno left-to-right language model. To restore masked characters: --model.kind infill"
        )
    if model.bidirectional is False and model.kind == "infill":
        raise UsageError("--model.bidirectional false: an infill model needs the text on both sides of a character.")
    if model.forget_bias is not None and model.chrono is not None:
        raise UsageError("--model.forget-bias and --model.chrono exclude each other: both set the same bias.")
    if not model.bias and (model.forget_bias is not None or model.chrono is not None):
        raise UsageError("--model.bias false leaves nothing for --model.forget-bias and --model.chrono to set.")
    unset = ModelConfig()
    for name, kinds in _OPTIONS_OF_KINDS.items():
        if model.kind not in kinds and getattr(model, name) != getattr(unset, name):
            raise UsageError(
                f"{option_name(('model', name))} is an option of kind {' and '.join(kinds)}; "
                f"--model.kind is {model.kind}."
            )


_OPTIONS_OF_KINDS = {
    "window": ("window",),
    "mask_fraction": ("infill",),
    "cell": ("recurrent", "infill"),
    "num_layers": ("recurrent", "infill"),
    "connections": ("recurrent",),
    "weight_drop": ("recurrent",),
    "zoneout": ("recurrent",),
    "forget_bias": ("recurrent", "infill"),
    "chrono": ("recurrent", "infill"),
    "tie_embeddings": ("recurrent",),
}
"""The options of a network that not every kind reads."""


def _check_truncation(config: Config) -> None:
    """Refuse options of truncated back-propagation that the mode does not read or that contradict each other."""
    train, data = config.train, config.data
    tau = train.truncation_length
    if train.stride != 1 and train.bptt != "sliding":
        raise UsageError(f"--train.stride is an option of --train.bptt sliding, which is {train.bptt}.")
    if train.keep_probability is not None and train.bptt != "randomised":
        raise UsageError(f"--train.keep-probability is an option of --train.bptt randomised, which is {train.bptt}.")
    if train.stride > data.sequence_length:
        raise UsageError(
            f"--train.stride {train.stride} is longer than the window, --data.sequence-length {data.sequence_length}: "
            "losses of two windows\ncannot look back together."
        )
    if tau is not None and train.keep_probability is not None:
        raise UsageError(
            "--train.truncation-length and --train.keep-probability exclude each other: under --train.bptt "
            "randomised\nboth set the chance that the gradient passes a step."
        )
    if data.shift_epochs and train.bptt in ("full", "sliding"):
        raise UsageError(
            f"--data.shift-epochs moves the windows' borders, which --train.bptt {train.bptt} has none of."
        )
    if tau is not None and train.bptt == "full":
        raise UsageError("--train.bptt full cuts nowhere: leave out --train.truncation-length.")
    if tau is not None and train.bptt in ("block", "randomised") and tau > data.sequence_length:
        raise UsageError(
            f"--train.truncation-length {tau} is longer than the window, --data.sequence-length "
            f"{data.sequence_length}: {train.bptt} truncation cuts\nat every window. Raise the sequence length, or "
            "look further back with --train.bptt sliding."
        )
    if not train.carry_state and train.bptt in ("sliding", "full"):
        why = (
            "sliding looks back\ninto the windows before, of which nothing is kept then."
            if train.bptt == "sliding"
            else "full reads a row's\nwhole text in one window, so nothing is carried."
        )
        raise UsageError(f"--train.carry-state false goes with --train.bptt block and randomised: {why}")
    if not train.carry_state and config.model.kind == "infill":
        raise UsageError(
            "--train.carry-state is an option of kinds recurrent and window; --model.kind infill reads each window "
            "by itself."
        )
    if train.bptt == "randomised" and train.keep_probability is None and (tau or data.sequence_length) == 1:
        raise UsageError(
            "--train.bptt randomised lets the gradient pass a step with probability 1 − 1/τ, which is 0 for "
            f"--{'data.sequence-length' if tau is None else 'train.truncation-length'} 1.\n"
            "Give it a longer one, or a --train.keep-probability."
        )
    recurrent = config.model.kind == "recurrent"
    if not recurrent and (train.bptt != "block" or tau is not None):
        raise UsageError(
            f"--train.bptt and --train.truncation-length are options of kind recurrent; "
            f"--model.kind is {config.model.kind}."
        )


def _check_omega(config: Config) -> None:
    """Refuse Ω for networks and gradients that it is not defined for."""
    model, bptt = config.model, config.train.bptt
    if model.kind != "recurrent":
        raise UsageError(f"--train.omega is an option of kind recurrent; --model.kind is {model.kind}.")
    if other := next((name for name in model.cells if name != "vanilla"), None):
        raise UsageError(
            f"--train.omega is an option of vanilla cells; one here is {other}. Ω is of the one product, W_hhᵀ(φ′∘g),\n"
            "by which those hand a gradient back; where there are gates there is no such one."
        )
    if bptt in ("sliding", "randomised"):
        why = (
            "sliding, which has\nanother one for every group of losses."
            if bptt == "sliding"
            else "randomised, which\ntrains on an estimate, longer or shorter by chance."
        )
        raise UsageError(f"--train.omega is made of one gradient of each state, so it goes not with --train.bptt {why}")
    for name in ("weight_drop", "zoneout"):
        if getattr(model, name):
            raise UsageError(
                f"--train.omega and --model.{name.replace('_', '-')} exclude each other: what a step hands back then "
                "does not pass the whole\nrecurrent matrix, or not it alone, and Ω is of that matrix."
            )


def _check_budget(config: Config) -> None:
    """Refuse a budget where nothing is measured."""
    if config.gradients.every_steps == 0:
        raise UsageError("--gradients.budget does nothing to --gradients.every-steps 0, which turns measuring off.")
    if config.model.kind == "infill":
        raise UsageError("--gradients.budget: there is no gradient decay of --model.kind infill to be measured.")


def option_names(kind: Any = None) -> list[tuple[str, ...]]:
    """The keys of every option, or of those of one type: `("data", "path"), …, ("name",)`."""
    names: list[tuple[str, ...]] = []
    for top, hint in get_type_hints(Config).items():
        if is_dataclass(hint):
            names += [(top, inner) for inner, type_ in get_type_hints(hint).items() if kind in (None, type_)]
        elif kind in (None, hint):
            names.append((top,))
    return names


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Options that differ, as (`section.option`, old value, new value)."""
    found = []
    for keys in option_names():
        before, after = _get(old, keys), _get(new, keys)
        if before != after:
            found.append((".".join(keys), before, after))
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean X?` if a known name is close, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def nearest_option(option: str, known: Iterable[str]) -> str:
    """` Did you mean --X?` for an option misspelt or put into another section, else an empty string."""

    def last(name: str) -> str:
        return name.lstrip("-").rpartition(".")[2]

    known = list(known)
    close = difflib.get_close_matches(last(option), sorted({last(name) for name in known}), n=1, cutoff=0.6)
    alike = [name for name in known if last(name) in close]
    best = max(alike, key=lambda name: difflib.SequenceMatcher(None, option, name).ratio(), default=None)
    return f" Did you mean {best}?" if best else ""


def _get(config: Config, keys: Sequence[str]) -> Any:
    value: Any = config
    for key in keys:
        value = getattr(value, key)
    return value


def _build(cls: Any, options: Mapping[str, Any], keys: tuple[str, ...], source: str) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    known = {f.name for f in fields(cls)}
    values = {}
    for name, value in options.items():
        path = (*keys, name)
        if name not in known and isinstance(value, Mapping) and not keys:
            raise UsageError(f"{source}There is no section {name}.{nearest(name, SECTIONS)}")
        if name not in known:
            close = nearest_option(option_name(path), map(option_name, option_names()))
            raise UsageError(f"{source}There is no option {option_name(path)}.{close}")
        if is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise UsageError(f"{source}{name} is a section: it takes options below it, not {value!r}.")
            values[name] = _build(hints[name], value, path, source)
        else:
            values[name] = _convert(hints[name], value, path, source)
    return cls(**values)


def _convert(hint: Any, value: Any, keys: tuple[str, ...], source: str) -> Any:
    """`value` as the annotation `hint` wants it, from its own type or from a command-line string."""
    option = option_name(keys)

    def refuse(allowed: str) -> UsageError:
        return UsageError(f"{source}{option} is {allowed}, not {value!r}.")

    bounds = Bounds()
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [h for h in get_args(hint) if h is not type(None)]
        is_text = str in (hint, *get_args(hint))  # there, "none" is a text like any other
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and not is_text):
            return None
    if get_origin(hint) is Annotated:
        hint, bounds = get_args(hint)
    if get_origin(hint) is Literal:
        text = str(value).lower() if isinstance(value, bool) else value
        if text not in get_args(hint):
            raise UsageError(
                f"{source}{option} is one of {', '.join(get_args(hint))}, not {value!r}."
                + nearest(str(value), get_args(hint))
            )
        return text
    if get_origin(hint) is list:
        items = [value] if isinstance(value, str | Path) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str | Path) and str(i) for i in items):
            raise refuse("a text or a list of them")
        if keys == ("model", "cell") and not items:
            raise refuse("at least one cell")
        return [str(i) for i in items]
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in BOOLEANS:
            return BOOLEANS[value.lower()]
        raise refuse("true or false")
    if hint in (int, float):
        kind = "a whole number" if hint is int else "a number"
        if str(bounds):
            kind += f" {bounds}"
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise refuse(kind)
        try:
            number = hint(value) if isinstance(value, str) or hint is float else value
        except (ValueError, OverflowError):
            raise refuse(kind) from None
        if hint is int and not isinstance(number, int):
            if number % 1 != 0:
                raise refuse(kind)
            number = int(number)
        if number not in bounds or number != number or number in (float("inf"), float("-inf")):
            raise refuse(kind)
        return number
    if hint is str:
        if not isinstance(value, str | Path) or len(str(value)) not in bounds:
            raise refuse("a text")
        return str(value)
    raise LmappError(f"{option} has an annotation that cannot be read: {hint}")
