"""The command line: parse, call, print. Nothing is computed here, and torch is imported inside commands only."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from cyclopts import UNSET, App, ArgumentCollection, CycloptsError, Parameter
from cyclopts.exceptions import CoercionError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from lmapp import cells
from lmapp import config as configuration
from lmapp.config import Config, DataConfig
from lmapp.errors import LmappError, UsageError
from lmapp.units import jsonable

app = App(
    name="lmapp",
    help="Train character-level recurrent language models on any text, and see what happens to their gradients.",
    version=version("lmapp"),
    # A list takes at least one value, and more where it is repeated; of any other option the last value counts.
    default_parameter=Parameter(negative=(), consume_multiple=1, allow_repeating=True),
    suppress_keyboard_interrupt=False,
    help_epilogue="`lmapp COMMAND --help` lists a command's options. `--debug` shows the traceback of an error.",
)

_given: dict[str, Any] = {}
"""The configuration's options on the command line, as they were written."""


def _collect(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take the configuration's options out of cyclopts' hands before it converts them.

    So that a value means the same, and is refused with the same words, in a file, in Python and here: cyclopts would
    round 1.5 to a whole number of steps.
    """
    _given.clear()
    if commands not in (("train",), ("corpus",)):
        return
    for argument in arguments:
        keys = argument.name.removeprefix("--").replace("-", "_").split(".")
        if argument.tokens and keys[0] in configuration.SECTIONS and len(keys) == 1:
            raise UsageError(f"--{keys[0]} is a section: name an option of it, as in lmapp {commands[0]} --help.")
        if not argument.tokens or tuple(keys) not in _OPTIONS:
            continue
        # A switch without a value has its meaning in the implicit value.
        values = [t.value if t.implicit_value is UNSET else t.implicit_value for t in argument.tokens]
        section = _given.setdefault(keys[0], {}) if len(keys) == 2 else _given
        section[keys[-1]] = values if tuple(keys) in _LISTS else values[-1]
        argument.tokens.clear()


def _joined(words: Sequence[str]) -> list[str]:
    """`--data.shrink false` as `--data.shrink=false`: cyclopts' switches take no word of their own.

    And `--data.path -` as `--data.path=-`, for a word that begins with a hyphen is no value to it.

    Raises:
        UsageError: the word says neither true nor false.
    """
    joined: list[str] = []
    option = ""
    for word in words:
        if word == "-" and option.replace("_", "-") in _PATHS:
            if joined[-1] == option:
                joined.pop()
            joined.append(f"{option}=-")
        elif joined and joined[-1].replace("_", "-") in _SWITCHES and not word.startswith("-") and not _is_config(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
            option = word if word.startswith("--") else option
    for word in joined:
        name, equals, value = word.partition("=")
        if equals and name.replace("_", "-") in _SWITCHES and value.lower() not in configuration.BOOLEANS:
            section, option = name.removeprefix("--").split(".")
            configuration.build({section: {option: value}})
    return joined


def _is_config(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


_OPTIONS = set(configuration.option_names())
_PATHS = {f"--data.{name}path" for name in ("", "val-", "test-")}
_LISTS = set(configuration.option_names(list[str]))
_SWITCHES = {
    configuration.option_name(keys) for kind in (bool, bool | None) for keys in configuration.option_names(kind)
}
app.config = _collect


def _whole_number(kind: Any, tokens: Sequence[Any]) -> int:
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"a whole number, not {tokens[0].value!r}.") from None


def _number(kind: Any, tokens: Sequence[Any]) -> float:
    try:
        return float(tokens[0].value)
    except ValueError:
        raise ValueError(f"a number, not {tokens[0].value!r}.") from None


def _text(kind: Any, tokens: Sequence[Any]) -> str:
    if not tokens[0].value:
        raise ValueError("a text, not ''.")
    return tokens[0].value


Integer = Annotated[int, Parameter(converter=_whole_number)]
Number = Annotated[float, Parameter(converter=_number)]
# A text may begin with a hyphen, as a line of dialogue does.
Prompt = Annotated[str, Parameter(allow_leading_hyphen=True)]
Imports = Annotated[
    list[str] | None,
    # One value each, so that what follows it is the checkpoint.
    Parameter(name="--import", consume_multiple=False, help="A module that holds a cell of your own (repeatable)."),
]
Json = Annotated[bool, Parameter(name="--json", help="Print one JSON document and nothing else.")]
RunsDir = Annotated[str, Parameter(converter=_text, help="Where runs are looked up by name.")]
DataPath = Annotated[list[str] | None, Parameter(name="--data.path", help="Files or globs of text to use.")]
Corpus = Annotated[str | None, Parameter(name="--data.corpus", converter=_text, help="A named corpus to use.")]
Encoding = Annotated[str | None, Parameter(name="--data.encoding", converter=_text, help="Of the files named.")]
Column = Annotated[str | None, Parameter(name="--data.column", converter=_text, help="Of rows, that holds the text.")]
CacheDir = Annotated[
    str | None, Parameter(name="--data.cache-dir", converter=_text, help="Where encoded text is kept.")
]


@app.command
def train(
    *configs: str,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008
    resume: str | None = None,
    import_: Imports = None,
) -> None:
    """Train a model; later files and options win.

    Args:
        configs: Configuration files (YAML).
        resume: A run to go on with exactly; only limits and logging may be changed.
    """
    given = dict(_given)
    _import(import_)
    if resume is not None:
        if configs:
            raise UsageError("--resume takes the run's own configuration: leave out the configuration files.")
        runs_dir = given.pop("runs_dir", Config().runs_dir)
        from lmapp.run import train as start

        start(resume=resume, runs_dir=runs_dir, changes=given)
        return
    taken = [word for section, option in _LISTS for word in given.get(section, {}).get(option, [])]
    if misplaced := [word for word in taken if _is_config(word)]:
        raise UsageError(f"{misplaced[0]} is a configuration, not text: put it before the options.")
    _check_one_text(given)
    options: dict[str, Any] = {}
    for path in configs:
        content = configuration.read_yaml(path)
        configuration.build(content, source=path)
        options = configuration.merge(options, content)
    checked = configuration.build(configuration.merge(options, given))
    for name in checked.model.cell:
        if ":" in name:
            with cells.searching_here():
                cells.find(name)
    from lmapp.run import train as start

    start(checked)


@app.command
def corpus(
    *paths: Annotated[str, Parameter(allow_leading_hyphen=True)],
    data: Annotated[DataConfig, Parameter(name="data")] = DataConfig(),  # noqa: B008
    json_: Json = False,
) -> None:
    """What a text is before a model is trained on it, and what may be wrong with it.

    Args:
        paths: Files, directories, globs, archives, addresses or - (standard input), as for --data.path.
    """
    for path in paths:
        if path.startswith("-") and path != "-":
            option = path.partition("=")[0]
            known = map(configuration.option_name, _OPTIONS)
            raise UsageError(f"There is no option {option}.{configuration.nearest_option(option, known)}")
    given: dict[str, Any] = {"data": dict(_given.get("data", {}))}
    if paths:
        given["data"]["path"] = [*paths, *given["data"].get("path", [])]
    _check_one_text(given)
    if {"val_path", "test_path"} & given["data"].keys() and not {"path", "corpus", "hub"} & given["data"].keys():
        raise UsageError("Name the text before the options: lmapp corpus PATH --data.val-path FILE")
    config = configuration.build(given).data
    from rich.console import Console

    from lmapp import describe
    from lmapp.data.inspection import inspect

    def say(message: str) -> None:
        print(message, file=sys.stderr)

    with describe.encoding_progress(Console(stderr=True)) as progress:
        inspection = inspect(config, progress=progress, say=say)
    if json_:
        _print_json(inspection.as_dict())
        return
    console = describe.Console(highlight=False)
    console.soft_wrap = not console.is_terminal  # in a pipe a line stays one line
    for name, text in inspection.lines():
        if name == "note":
            describe.note(console, text)
        else:
            describe.line(console, name, text)


def _check_one_text(given: dict[str, Any]) -> None:
    texts = [name for name in ("path", "corpus", "hub", "task") if name in given.get("data", {})]
    if len(texts) > 1:
        raise UsageError(
            f"--data.{texts[0]} and --data.{texts[1]} exclude each other: train on files, a named corpus, a data set "
            "of the hub or a task."
        )


@app.command
def generate(
    checkpoint: str,
    *,
    prompt: Prompt = "",
    length: Integer = 500,
    temperature: Number = 1.0,
    top_k: Integer | None = None,
    top_p: Number | None = None,
    stop: list[str] | None = None,
    samples: Integer = 1,
    seed: Integer | None = None,
    import_: Imports = None,
    runs_dir: RunsDir = "runs",
    json_: Json = False,
) -> None:
    """Write text, as it is drawn.

    Args:
        checkpoint: A file, a run's directory or a run's name.
        prompt: The text to write on from.
        length: New characters, at most.
        temperature: 0 always takes the likeliest character, 1 draws from the model's own distribution.
        top_k: Draw among the k likeliest characters only.
        top_p: Draw among the likeliest characters that together have probability p only.
        stop: Text that ends the writing (may be given more than once).
        samples: Texts to write.
        seed: The same seed gives the same text; by default another one every time.
    """
    _import(import_)
    from lmapp.inference import load
    from lmapp.inference.generation import Sampling

    if samples < 1:
        raise UsageError(f"--samples is a whole number at least 1, not {samples}.")
    sampling = Sampling(temperature, top_k, top_p)
    model = load(checkpoint, runs_dir=runs_dir)
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    stops = stop or []
    if json_:
        texts = model.samples(samples, prompt, length, sampling=sampling, stop=stops, seed=seed)
        _print_json({"checkpoint": str(model.path), "step": model.step, "seed": seed, "prompt": prompt, "texts": texts})
    elif samples == 1:
        pieces = model.stream(prompt, length, sampling=sampling, stop=stops, seed=seed)
        print(prompt + next(pieces, ""), end="", flush=True)  # a prompt that is refused is not printed
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    else:
        for number, text in enumerate(
            model.samples(samples, prompt, length, sampling=sampling, stop=stops, seed=seed), 1
        ):
            print(f"--- {number} ---\n{prompt}{text}")


@app.command
def evaluate(
    checkpoint: str,
    *,
    path: DataPath = None,
    corpus: Corpus = None,
    split: Literal["train", "validation", "test"] | None = None,
    encoding: Encoding = None,
    column: Column = None,
    import_: Imports = None,
    cache_dir: CacheDir = None,
    runs_dir: RunsDir = "runs",
    json_: Json = False,
) -> None:
    """Loss, perplexity and bits per character of a text, by default the run's own validation split.

    Args:
        checkpoint: A file, a run's directory or a run's name.
        split: Of the run's own text, by default validation.
    """
    _import(import_)
    from lmapp.inference import load
    from lmapp.inference.infill import InfillEvaluation

    result = load(checkpoint, runs_dir=runs_dir).evaluate(
        path or (), corpus=corpus, split=split, encoding=encoding, column=column, cache_dir=cache_dir
    )
    if json_:
        _print_json(result.as_dict())
        return
    if result.warning:
        print(f"warning: {result.warning}", file=sys.stderr)
    if isinstance(result, InfillEvaluation):
        print(f"{result.text}: {result.score.characters:,} masked characters, in windows of {result.window}")
        print(f"  infill loss {result.score.loss:.4f} nats per masked character (no perplexity: both sides are read)")
        return
    figures = result.as_dict()
    if result.cold is None:
        print(f"{result.text}: {figures['characters']:,} characters of answers, each record from the initial state")
        print(
            f"  accuracy {figures['accuracy']:.4f}, loss {figures['loss']:.4f} nats, "
            f"perplexity {figures['perplexity']:.3f}"
        )
        return
    print(f"{result.text}: {result.carried.characters + 1:,} characters")
    for name, score in (("state carried", result.carried), ("cold windows of 256", result.cold)):
        print(
            f"  {name:<20} loss {score.loss:.4f} nats, perplexity {score.perplexity:.3f}, "
            f"{score.bits_per_char:.4f} bits per character, {score.bits_per_byte:.4f} bits per byte"
        )


@app.command
def infill(
    checkpoint: str,
    text: Prompt | None = None,
    *,
    mask: Prompt = "_",
    import_: Imports = None,
    runs_dir: RunsDir = "runs",
    json_: Json = False,
) -> None:
    """Restore the masked characters of a text, the surest one first.

    The restored text goes to standard output, what was chosen at each place and what else it might be to standard
    error. Only an infill model does it: --model.kind infill.

    Args:
        checkpoint: A file, a run's directory or a run's name.
        text: A mask stands in the place of each missing character; - or none reads standard input.
        mask: What marks a place: one character, for one of the alphabet's (never one that has to be spelt in bytes).
    """
    _import(import_)
    from lmapp.inference import load

    given = _standard_input() if text is None or text == "-" else text
    model = load(checkpoint, runs_dir=runs_dir)
    result = model.infill(given, mask)
    if json_:
        _print_json({"checkpoint": str(model.path), "step": model.step, "mask": mask, **result.as_dict()})
        return
    print(result.text)
    for place in result.places:
        others = ", ".join(f"{character!r} {probability:.3f}" for character, probability in place.alternatives)
        print(f"  {place.position + 1:>5}  {place.character!r} {place.probability:.3f}  ({others})", file=sys.stderr)


def _standard_input() -> str:
    """A text from standard input, without the line end that closes it.

    Raises:
        UsageError: nobody has sent one, or it is not UTF-8.
    """
    if sys.stdin.isatty():
        raise UsageError("Name the text, or send it to standard input: lmapp infill CKPT TEXT")
    try:
        return sys.stdin.read().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input, byte {error.start}: this is not UTF-8 text.") from None


@app.command
def gradients(
    *checkpoints: str,
    path: DataPath = None,
    encoding: Encoding = None,
    column: Column = None,
    max_lag: Integer | None = None,
    windows: Integer = 8,
    influence: Prompt | None = None,
    png: str | None = None,
    import_: Imports = None,
    cache_dir: CacheDir = None,
    runs_dir: RunsDir = "runs",
    json_: Json = False,
) -> None:
    """How far back the gradient of one or several checkpoints reaches, and why: figures and a picture.

    Args:
        checkpoints: Files, run directories or names of runs.
        max_lag: The longest lag; by default twice the steps that a loss looks back, and no more than 512.
        windows: Windows of text it is measured on.
        influence: Instead, what the prediction of this text's last character rests on, as a heat map over the text.
        png: The picture to write: gradients.png, or influence.png.
    """
    if not checkpoints:
        raise UsageError("Name at least one checkpoint or run: lmapp gradients RUN.")
    if max_lag is not None and max_lag < 2:
        raise UsageError(f"--max-lag is a whole number at least 2, not {max_lag}.")
    if windows < 1:
        raise UsageError(f"--windows is a whole number at least 1, not {windows}.")
    picture = Path(("gradients.png" if influence is None else "influence.png") if png is None else png)
    if not picture.name:
        raise UsageError(f"--png is the name of a file to write, not {png!r}.")
    if picture.suffix.lower() != ".png":
        raise UsageError(f"--png writes PNG pictures: name it {picture.name}.png.")
    _import(import_)
    if influence is not None:
        if len(checkpoints) > 1:
            raise UsageError("--influence is of one checkpoint: name one.")
        idle = {"data.path": path, "data.encoding": encoding, "data.column": column, "max-lag": max_lag}
        idle |= {"windows": windows != 8, "data.cache-dir": cache_dir}
        if unread := next((name for name, value in idle.items() if value), None):
            raise UsageError(f"--{unread} does nothing to --influence, which is of the text given with it.")
        _influence(checkpoints[0], influence, picture, runs_dir, json_)
        return
    from lmapp import describe, laboratory

    measured = laboratory.measure_checkpoints(
        checkpoints,
        paths=path or (),
        encoding=encoding,
        column=column,
        max_lag=max_lag,
        windows=windows,
        runs_dir=runs_dir,
        cache_dir=cache_dir,
    )
    laboratory.draw(measured, picture)
    if json_:
        _print_json({"checkpoints": [m.as_dict() for m in measured], "png": str(picture)})
        return
    console = describe.Console(highlight=False)
    console.soft_wrap = not console.is_terminal  # in a pipe a line stays one line
    for m in measured:
        describe.line(console, m.label, f"{m.cell}, step {m.step:,}, measured on {m.text}")
        for name, text in m.lines():
            describe.line(console, name, text)
    describe.line(console, "picture", str(picture))


def _influence(checkpoint: str, text: str, picture: Path, runs_dir: str, as_json: bool) -> None:
    from rich.text import Text

    from lmapp import describe, laboratory

    found = laboratory.measure_influence(checkpoint, text, runs_dir=runs_dir)
    laboratory.draw_influences(found, picture)
    if as_json:
        _print_json({**found.as_dict(), "png": str(picture)})
        return
    console = describe.Console(highlight=False)
    console.soft_wrap = not console.is_terminal
    shaded = Text()
    for character, level in zip(found.characters, found.levels, strict=True):
        shade = int(255 * level)
        shaded.append(character, f"{'black' if level > 0.5 else 'white'} on rgb({shade},{shade},{64 + shade * 3 // 4})")
    console.print(shaded.append(found.predicted, "bold underline"))
    most = ", ".join(f"{character!r} {lag} back {norm:.2g}" for lag, character, norm in found.most())
    describe.line(console, "predicted", f"{found.predicted!r}, by {found.label}")
    describe.line(console, "rests on", f"{most} (gradient norms)")
    describe.line(console, "picture", str(picture))


@app.command
def compare(
    *runs: str,
    runs_dir: RunsDir = "runs",
    json_: Json = False,
) -> None:
    """Runs side by side: what differs in their configurations and how they came out.

    Args:
        runs: Run directories or names of runs; all runs, if none is named.
    """
    from lmapp.experiments import compare as comparing
    from lmapp.experiments import history

    names = runs or tuple(sorted(p.name for p in Path(runs_dir).glob("*/") if (p / "config.yaml").is_file()))
    if not names:
        raise UsageError(f"{runs_dir}/ holds no run to compare.")
    comparison = comparing.compare([history.find(name, runs_dir) for name in names])
    if json_:
        _print_json(comparison.as_dict())
        return
    from rich.console import Console

    console = Console(highlight=False)
    for table in comparison.tables(console.width):
        console.print(table)


def _import(modules: Sequence[str] | None) -> None:
    """Import what --import names, before anything is read."""
    for module in modules or ():
        with cells.searching_here():
            cells.import_module(module, f"--import {module}: it")


def _print_json(document: Any) -> None:
    print(json.dumps(jsonable(document), ensure_ascii=False, indent=1, allow_nan=False))


def _fail(message: str, code: int) -> NoReturn:
    # Of the processes that torchrun or srun starts the first one speaks.
    if os.environ.get("RANK" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_PROCID", "0") == "0":
        print(message, file=sys.stderr)
    raise SystemExit(code)


def _explain(error: CycloptsError) -> str:
    """A wrong command line in one line, in the words that `config` has for the same."""
    command = " ".join(["lmapp", *(error.command_chain or ())])
    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        known = [name for argument in error.argument_collection for name in argument.names]
        return f"There is no option {option}.{configuration.nearest_option(option, known)}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        if error.keyword is None and error.argument.field_info.is_positional:
            what = error.argument.name.removeprefix("--")
            return f"{command} needs a {what}; name it first: {command} {what.upper()} --option …"
        return f"{error.keyword or error.argument.name} needs a value."
    if isinstance(error, UnusedCliTokensError):
        return f"{command} does not know what to do with {' '.join(error.unused_tokens or ())}."
    if isinstance(error, CoercionError) and error.msg is not None and error.token is not None:
        return f"{error.token.keyword} is {error.msg}"
    return " ".join(str(error).split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; an error a user can cause is at most three lines on standard error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character ends nothing
    try:
        words = _joined([word for word in words if word != "--debug"])
        app(words, exit_on_error=False, print_error=False)
        print(end="", flush=True)  # so that what goes wrong with it goes wrong here
    except CycloptsError as error:
        if debug:
            raise
        _fail(_explain(error), 2)
    except LmappError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        if debug:
            raise
        _fail("Interrupted.", 130)
    except BrokenPipeError:
        # The reader of the pipe has gone: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (MemoryError, RuntimeError) as error:
        # torch has no type of its own for memory that the system refuses.
        refused = isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)
        if debug or not refused:
            raise
        _fail("Out of memory. Try a smaller --model.hidden-size, --data.batch-size or --data.sequence-length.", 1)
    except OSError as error:
        if debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}.", 1)
