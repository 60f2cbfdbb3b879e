"""Options: built, refused, merged, written down and read again."""

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import yaml

from lmapp import config as configuration
from lmapp.cells import CELLS
from lmapp.config import (
    RESUMABLE,
    Bounds,
    Config,
    build,
    differences,
    merge,
    nearest,
    nearest_option,
    option_name,
    option_names,
    read_yaml,
)
from lmapp.errors import UsageError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))

EVERYTHING: dict[str, Any] = {
    "data": {
        "path": ["a.txt", "b/*.txt"],
        "corpus": "tiny_shakespeare",
        "batch_size": 7,
        "sequence_length": 9,
        "val_fraction": 0.25,
        "test_fraction": 0.125,
        "column": "body",
        "separator": "",
        "reset_state": True,
        "encoding": "latin-1",
        "errors": "skip",
        "newlines": "lf",
        "normalization": "nfkc",
        "lowercase": True,
        "min_count": 3,
        "byte_fallback": "true",
        "split_at": "record",
        "cache_dir": "elsewhere",
        "shrink": False,
    },
    "model": {
        "cell": "vanilla",
        "hidden_size": 3,
        "num_layers": 2,
        "embedding_size": 5,
        "activation": "relu",
        "bias": False,
        "connections": "dense",
        "dropout": 0.5,
        "weight_drop": 0.25,
        "zoneout": 0.125,
        "tie_embeddings": True,
        "init": "torch",
    },
    "train": {
        "max_steps": 11,
        "max_minutes": 0.5,
        "max_epochs": 2,
        "learning_rate": 1e-05,
        "optimizer": "rmsprop",
        "momentum": 0.75,
        "schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "clip_norm": None,
        "clip_value": 2.5,
        "bptt": "sliding",
        "truncation_length": 20,
        "stride": 3,
        "val_every_steps": 0,
        "checkpoint_minutes": 1.5,
        "max_nonfinite": 1,
        "precision": "fp32",
        "device": "cpu",
    },
    "gradients": {"every_steps": 0, "max_lag": 2, "windows": 1, "spectrum_every_steps": 7},
    "logging": {
        "wandb": "disabled",
        "project": "p",
        "group": "none",
        "job_type": "wide",
        "tags": ["x", "y: z"],
        "notes": "with all options",
        "artifact": "best",
        "every_steps": 1,
    },
    "name": "none",
    "runs_dir": "r",
    "seed": 0,
}
"""Every option that goes with the others, with another value than its default."""

APART: dict[tuple[str, str], dict[str, Any]] = {
    ("data", "hub"): {"data": {"hub": "owner/name"}},
    ("data", "hub_config"): {"data": {"hub": "owner/name", "hub_config": "en"}},
    ("data", "hub_split"): {"data": {"hub": "owner/name", "hub_split": "test"}},
    ("data", "alphabet"): {"data": {"alphabet": "bytes"}},
    ("data", "streaming"): {"data": {"streaming": True}},
    ("data", "stream_steps"): {"data": {"streaming": True, "stream_steps": 3}},
    ("data", "alphabet_from"): {"data": {"streaming": True, "alphabet_from": 3}},
    ("data", "shuffle_files"): {"data": {"streaming": True, "shuffle_files": True}},
    ("data", "shift_epochs"): {"data": {"shift_epochs": True}},
    ("data", "val_path"): {"data": {"val_path": ["v.txt"]}},
    ("data", "test_path"): {"data": {"test_path": ["t.txt"]}},
    ("gradients", "budget"): {"gradients": {"budget": 0.5}},
    ("train", "omega"): {"model": {"cell": "vanilla"}, "train": {"omega": 0.5}},
    ("data", "task"): {"data": {"task": "copy"}},
    ("data", "task_delay"): {"data": {"task": "order", "task_delay": 7}},
    ("data", "task_length"): {"data": {"task": "copy", "task_length": 5}},
    ("data", "task_records"): {"data": {"task": "copy", "task_records": 500}},
    ("train", "target_accuracy"): {"data": {"task": "copy"}, "train": {"target_accuracy": 0.5}},
    ("model", "kind"): {"model": {"kind": "window"}},
    ("model", "window"): {"model": {"kind": "window", "window": 3}},
    ("model", "forget_bias"): {"model": {"forget_bias": -1.5}},
    ("model", "chrono"): {"model": {"chrono": 9.0}},
    ("model", "bidirectional"): {"model": {"kind": "infill", "bidirectional": True}},
    ("model", "mask_fraction"): {"model": {"kind": "infill", "mask_fraction": 0.5}},
    ("train", "keep_probability"): {"train": {"bptt": "randomised", "keep_probability": 0.5}},
    ("train", "carry_state"): {"train": {"carry_state": False}},
}
"""The other options, each with what it needs."""

NEEDED: dict[tuple[str, ...], dict[str, Any]] = {
    ("train", "momentum"): {"train": {"optimizer": "sgd"}},
    ("train", "truncation_length"): {"train": {"bptt": "sliding"}},
    ("train", "stride"): {"train": {"bptt": "sliding"}},
    **{
        keys: {**given, keys[0]: {k: v for k, v in given[keys[0]].items() if k != keys[1]}}
        for keys, given in APART.items()
    },
}
"""What has to be given beside an option, so that it may be."""


def message(options: dict[str, Any], **kwargs: Any) -> str:
    with pytest.raises(UsageError) as caught:
        build(options, **kwargs)
    return str(caught.value)


def nested(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {keys[0]: nested(keys[1:], value)} if keys else value


def hints() -> dict[tuple[str, ...], Any]:
    """The annotation of every option."""
    found = {}
    for keys in option_names():
        place: Any = Config
        for key in keys:
            place = get_type_hints(place, include_extras=True)[key]
        found[keys] = place
    return found


def bounded() -> list[tuple[tuple[str, ...], type, Bounds]]:
    """Every option with bounds: its keys, kind and bounds."""
    found = []
    for keys, hint in hints().items():
        parts = [hint] if get_origin(hint) is Annotated else [h for h in get_args(hint) if get_origin(h) is Annotated]
        if parts and get_args(parts[0])[0] in (int, float):
            found.append((keys, *get_args(parts[0])))
    return found


# Building -------------------------------------------------------------------------------------------------------------


def test_nothing_given_is_the_default_configuration() -> None:
    assert build({}) == Config()


def test_the_example_of_everything_names_every_option() -> None:
    config = build(EVERYTHING)
    given = config.as_dict()
    assert {name: {o: given[name][o] for o in rest} if isinstance(rest, dict) else given[name]
            for name, rest in EVERYTHING.items()} == EVERYTHING  # fmt: skip
    named = [name for name, _, _ in differences(Config(), config)]
    assert named == [".".join(keys) for keys in option_names() if keys not in APART]
    for keys, options in APART.items():
        changed = {name: (new, old) for name, old, new in differences(Config(), build(options))}
        assert changed[".".join(keys)][0] == options[keys[0]][keys[1]]


def test_a_stack_of_cells_is_a_list_and_one_cell_a_name() -> None:
    for written, meant in [("gru", ["gru"]), (["gru"], ["gru"]), (["lstm", "a:B"], ["lstm", "a:B"])]:
        model = build({"model": {"cell": written}}).model
        assert (model.cell, model.cells) == (meant, meant)
    assert build({"model": {"cell": "gru", "num_layers": 3}}).model.cells == ["gru"] * 3
    assert build({"model": {"cell": ["gru", "lstm"], "num_layers": 2}}).model.cells == ["gru", "lstm"]
    assert build({"model": {"cell": ["gru"]}}).as_dict()["model"]["cell"] == "gru"
    assert build({"model": {"cell": ["gru", "m:Own"]}}).model.label == "gru+Own"
    assert build({"model": {"cell": ["gru"] * 9}}).model.label == "gru"
    assert build({"model": {"cell": ["gru", "lstm", "mingru", "minlstm"]}}).model.label == "gru+lstm+2more"
    assert len(build({"model": {"cell": "a.b:" + "C" * 300}}).model.label) == 40
    assert build({"model": {"kind": "window"}}).model.label == "window"
    assert build({"model": {"kind": "infill", "cell": "lstm"}}).model.label == "infill-lstm"


def test_values_as_text_mean_the_same() -> None:
    def text(value: Any) -> Any:
        if isinstance(value, dict):
            return {key.replace("_", "-"): text(inner) for key, inner in value.items()}
        return value if isinstance(value, list) else str(value)

    assert build(text(EVERYTHING)) == build(EVERYTHING)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_file_of_configs_builds_and_round_trips(path: Path) -> None:
    config = build(read_yaml(path), source=str(path))
    assert build(config.as_dict()) == config
    assert json.loads(json.dumps(config.as_dict())) == config.as_dict()
    assert len(path.read_text().splitlines()) < 40
    text = " --data.path my.txt" if path.name.startswith("recipe_") else ""
    assert path.read_text().startswith(f"# lmapp train configs/{path.name}{text}\n")


def test_configs_are_there() -> None:
    assert {f"{name}.yaml" for name in ("default", "stacked", "mixed", "window", "infill", *CELLS)} <= {
        p.name for p in CONFIGS
    }


@pytest.mark.parametrize("options", [{}, EVERYTHING, *APART.values()])
def test_round_trip_through_yaml(tmp_path: Path, options: dict[str, Any]) -> None:
    config = build(options)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    assert build(read_yaml(file)) == config


@pytest.mark.parametrize("separator", ["\n---\n", "\t", " ", "\u2029", "\x00", "no", "~", "'\"", "é"])
def test_any_separator_round_trips(tmp_path: Path, separator: str) -> None:
    file = tmp_path / "config.yaml"
    config = build({"data": {"separator": separator}})
    file.write_text(yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    assert read_yaml(file)["data"]["separator"] == separator
    assert build(read_yaml(file)) == config


def test_scientific_notation_without_a_point_is_a_number_though_yaml_calls_it_text(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train: {learning_rate: 4e-3, weight_decay: 1E-2}\n")
    assert read_yaml(file)["train"]["learning_rate"] == "4e-3"
    train = build(read_yaml(file)).train
    assert (train.learning_rate, train.weight_decay) == (0.004, 0.01)


def test_paths_and_tuples_are_taken_from_python() -> None:
    config = build({"data": {"path": (Path("a.txt"), "b.txt"), "cache_dir": Path("c")}, "runs_dir": Path("r")})
    assert (config.data.path, config.data.cache_dir, config.runs_dir) == (["a.txt", "b.txt"], "c", "r")
    assert build({"data": {"path": "a.txt"}}).data.path == ["a.txt"]
    assert build({"data": {"path": []}}).data.path == []


def test_whole_floats_are_whole_numbers() -> None:
    steps = build({"train": {"max_steps": 100.0}}).train.max_steps
    assert steps == 100
    assert type(steps) is int
    assert type(build({"train": {"learning_rate": 1}}).train.learning_rate) is float


@pytest.mark.parametrize("spelling", ["none", "None", "null", "NULL", None])
def test_none_switches_a_number_off(spelling: Any) -> None:
    assert build({"train": {"clip_norm": spelling}}).train.clip_norm is None


def test_none_is_a_text_like_any_other() -> None:
    config = build({"name": "none", "logging": {"group": "null"}, "data": {"separator": "None"}})
    assert (config.name, config.logging.group, config.data.separator) == ("none", "null", "None")


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [(True, True), ("true", True), ("Yes", True), ("ON", True), (False, False), ("false", False), ("no", False)],
)
def test_switches(spelling: Any, meant: bool) -> None:
    assert build({"train": {"carry_state": spelling}}).train.carry_state is meant


@pytest.mark.parametrize("written", ["true", True])
def test_a_choice_that_yaml_takes_for_a_switch(written: Any) -> None:
    assert build({"data": {"byte_fallback": written}}).data.byte_fallback == "true"


def test_clipping_by_value_takes_the_place_of_the_default_clipping_by_norm() -> None:
    train = build({"train": {"clip_value": 0.5}}).train
    assert (train.clip_norm, train.clip_value) == (None, 0.5)
    assert build({"train": {"clip_value": 0.5, "clip_norm": None}}).train == train
    for name in ("clip_norm", "clip-norm"):
        assert message({"train": {"clip-value": 0.5, name: 1.0}}) == (
            "--train.clip-value and --train.clip-norm exclude each other: set one of them to none."
        )


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Misspelt.
        ({"data": {"batchsize": 3}}, "There is no option --data.batchsize. Did you mean --data.batch-size?"),
        ({"data": {"batch-sise": 3}}, "There is no option --data.batch-sise. Did you mean --data.batch-size?"),
        ({"sede": 3}, "There is no option --sede. Did you mean --seed?"),
        ({"runs": "x"}, "There is no option --runs. Did you mean --runs-dir?"),
        ({"gradients": {"every_step": 3}}, "There is no option --gradients.every-step. "
         "Did you mean --gradients.every-steps?"),
        ({"logging": {"every_step": 3}}, "There is no option --logging.every-step. "
         "Did you mean --logging.every-steps?"),
        ({"train": {"frobnicate": 3}}, "There is no option --train.frobnicate."),
        ({"frobnicate": 3}, "There is no option --frobnicate."),
        ({7: 3}, "There is no option --7."),
        # Put elsewhere.
        ({"train": {"batch_size": 3}}, "There is no option --train.batch-size. Did you mean --data.batch-size?"),
        ({"hidden_size": 3}, "There is no option --hidden-size. Did you mean --model.hidden-size?"),
        ({"train": {"seed": 3}}, "There is no option --train.seed. Did you mean --seed?"),
        ({"train": {"hiden_size": 3}}, "There is no option --train.hiden-size. Did you mean --model.hidden-size?"),
        ({"modle": {"cell": "gru"}}, "There is no section modle. Did you mean model?"),
        ({"optimizer": {"name": "sgd"}}, "There is no section optimizer."),
        ({"data": {"path": {"a": 1}}}, "--data.path is a text or a list of them, not {'a': 1}."),
        # A section that is none.
        ({"train": 3}, "train is a section: it takes options below it, not 3."),
        ({"train": None}, "train is a section: it takes options below it, not None."),
        ({"train": ["max_steps"]}, "train is a section: it takes options below it, not ['max_steps']."),
        # Whole numbers.
        ({"train": {"max_steps": 0}}, "--train.max-steps is a whole number at least 1, not 0."),
        ({"train": {"max_steps": -1}}, "--train.max-steps is a whole number at least 1, not -1."),
        ({"train": {"max_steps": 1.5}}, "--train.max-steps is a whole number at least 1, not 1.5."),
        ({"train": {"max_steps": "1.5"}}, "--train.max-steps is a whole number at least 1, not '1.5'."),
        ({"train": {"max_steps": "many"}}, "--train.max-steps is a whole number at least 1, not 'many'."),
        ({"train": {"max_steps": ""}}, "--train.max-steps is a whole number at least 1, not ''."),
        ({"train": {"max_steps": True}}, "--train.max-steps is a whole number at least 1, not True."),
        ({"train": {"max_steps": [1]}}, "--train.max-steps is a whole number at least 1, not [1]."),
        ({"train": {"max_steps": float("nan")}}, "--train.max-steps is a whole number at least 1, not nan."),
        ({"train": {"max_steps": float("inf")}}, "--train.max-steps is a whole number at least 1, not inf."),
        ({"train": {"max_steps": "inf"}}, "--train.max-steps is a whole number at least 1, not 'inf'."),
        ({"train": {"warmup_steps": None}}, "--train.warmup-steps is a whole number at least 0, not None."),
        ({"seed": 2**32}, "--seed is a whole number at least 0 and at most 4294967295, not 4294967296."),
        ({"model": {"hidden_size": 10**7}},
         "--model.hidden-size is a whole number at least 1 and at most 1000000, not 10000000."),
        ({"gradients": {"max_lag": 1}}, "--gradients.max-lag is a whole number at least 2, not 1."),
        # Numbers.
        ({"train": {"learning_rate": 0}}, "--train.learning-rate is a number more than 0, not 0."),
        ({"train": {"learning_rate": "nan"}}, "--train.learning-rate is a number more than 0, not 'nan'."),
        ({"train": {"learning_rate": float("inf")}}, "--train.learning-rate is a number more than 0, not inf."),
        ({"train": {"learning_rate": "1e999"}}, "--train.learning-rate is a number more than 0, not '1e999'."),
        ({"train": {"learning_rate": "fast"}}, "--train.learning-rate is a number more than 0, not 'fast'."),
        ({"train": {"learning_rate": False}}, "--train.learning-rate is a number more than 0, not False."),
        ({"train": {"learning_rate": None}}, "--train.learning-rate is a number more than 0, not None."),
        ({"train": {"learning_rate": "none"}}, "--train.learning-rate is a number more than 0, not 'none'."),
        ({"train": {"weight_decay": -1}}, "--train.weight-decay is a number at least 0, not -1."),
        ({"data": {"val_fraction": 1}}, "--data.val-fraction is a number at least 0 and less than 1, not 1."),
        # Choices.
        ({"train": {"optimizer": "adamm"}},
         "--train.optimizer is one of adamw, adam, rmsprop, sgd, not 'adamm'. Did you mean adam?"),
        ({"train": {"optimizer": "lion"}}, "--train.optimizer is one of adamw, adam, rmsprop, sgd, not 'lion'."),
        ({"train": {"optimizer": 3}}, "--train.optimizer is one of adamw, adam, rmsprop, sgd, not 3."),
        ({"train": {"optimizer": ["sgd"]}}, "--train.optimizer is one of adamw, adam, rmsprop, sgd, not ['sgd']. "
         "Did you mean sgd?"),
        ({"logging": {"wandb": False}}, "--logging.wandb is one of auto, online, offline, disabled, not False."),
        ({"train": {"precision": "fp16"}},
         "--train.precision is one of auto, fp32, bf16, not 'fp16'. Did you mean bf16?"),
        # Switches.
        ({"data": {"shrink": "maybe"}}, "--data.shrink is true or false, not 'maybe'."),
        ({"data": {"shrink": 1}}, "--data.shrink is true or false, not 1."),
        ({"data": {"shrink": None}}, "--data.shrink is true or false, not None."),
        # Texts and lists of them.
        ({"name": 3}, "--name is a text, not 3."),
        ({"name": ""}, "--name is a text, not ''."),
        ({"runs_dir": ""}, "--runs-dir is a text, not ''."),
        ({"model": {"cell": None}}, "--model.cell is a text or a list of them, not None."),
        ({"model": {"cell": []}}, "--model.cell is at least one cell, not []."),
        ({"model": {"cell": ["gru", ""]}}, "--model.cell is a text or a list of them, not ['gru', '']."),
        ({"data": {"path": 3}}, "--data.path is a text or a list of them, not 3."),
        ({"data": {"path": ["a", 3]}}, "--data.path is a text or a list of them, not ['a', 3]."),
        ({"data": {"path": ["a", ""]}}, "--data.path is a text or a list of them, not ['a', '']."),
        ({"data": {"path": None}}, "--data.path is a text or a list of them, not None."),
        # Options that do not go together.
        ({"data": {"val_fraction": 0.5, "test_fraction": 0.5}},
         "--data.val-fraction and --data.test-fraction leave nothing to train on: their sum must stay below 1."),
        ({"model": {"cell": ["gru", "lstm"], "num_layers": 3}},
         "--model.cell names 2 layers, --model.num-layers is 3: set it to none."),
        ({"model": {"bidirectional": True}},
         "--model.bidirectional: a network that reads the text both ways has read the character it is to predict, "
         "so it is\nno left-to-right language model. To restore masked characters: --model.kind infill"),
        ({"model": {"kind": "infill", "bidirectional": False}},
         "--model.bidirectional false: an infill model needs the text on both sides of a character."),
        ({"model": {"forget_bias": 1, "chrono": 9}},
         "--model.forget-bias and --model.chrono exclude each other: both set the same bias."),
        ({"model": {"forget_bias": 1, "bias": False}},
         "--model.bias false leaves nothing for --model.forget-bias and --model.chrono to set."),
        ({"logging": {"tags": ["x", "y" * 65]}},
         f"--logging.tags: W&B takes tags of at most 64 characters, not '{'y' * 65}'."),
        ({"model": {"window": 3}}, "--model.window is an option of kind window; --model.kind is recurrent."),
        ({"model": {"kind": "window", "cell": "lstm"}},
         "--model.cell is an option of kind recurrent and infill; --model.kind is window."),
        ({"model": {"kind": "infill", "zoneout": 0.1}},
         "--model.zoneout is an option of kind recurrent; --model.kind is infill."),
        ({"train": {"stride": 2}}, "--train.stride is an option of --train.bptt sliding, which is block."),
        ({"train": {"keep_probability": 0.5}},
         "--train.keep-probability is an option of --train.bptt randomised, which is block."),
        ({"train": {"bptt": "full", "truncation_length": 5}},
         "--train.bptt full cuts nowhere: leave out --train.truncation-length."),
        ({"train": {"truncation_length": 65}},
         "--train.truncation-length 65 is longer than the window, --data.sequence-length 64: block truncation cuts\n"
         "at every window. Raise the sequence length, or look further back with --train.bptt sliding."),
        ({"train": {"bptt": "full"}, "model": {"kind": "infill"}},
         "--train.bptt and --train.truncation-length are options of kind recurrent; --model.kind is infill."),
        # Both spellings.
        ({"data": {"batch_size": 3, "batch-size": 4}}, "batch_size is given twice, as batch_size and as batch-size."),
    ],
)  # fmt: skip
def test_refusals_in_one_line(options: dict[str, Any], expected: str) -> None:
    assert message(options) == expected


def test_a_file_is_named() -> None:
    assert message({"seed": "x"}, source="my.yaml") == (
        "my.yaml: --seed is a whole number at least 0 and at most 4294967295, not 'x'."
    )
    assert message({"sede": 1}, source="my.yaml").startswith("my.yaml: There is no option --sede.")


@pytest.mark.parametrize(
    ("keys", "kind", "bounds"), bounded(), ids=lambda value: ".".join(value) if isinstance(value, tuple) else ""
)
def test_every_number_is_taken_up_to_its_bounds(keys: tuple[str, ...], kind: type, bounds: Bounds) -> None:
    def taken(value: float) -> bool:
        try:
            build(merge(NEEDED.get(keys, {}), nested(keys, kind(value))))
        except UsageError:
            return False
        return True

    little = 1 if kind is int else 1e-9
    assert taken(bounds.low) is not bounds.open_low
    assert taken(bounds.low + little)
    assert not taken(bounds.low - little)
    if bounds.high != float("inf"):
        assert taken(bounds.high) is not bounds.open_high
        assert taken(bounds.high - little)
        assert not taken(bounds.high + little)


def test_every_number_has_a_lower_bound() -> None:
    kinds = {
        keys: [hint] if get_origin(hint) is Annotated else [hint, *get_args(hint)] for keys, hint in hints().items()
    }
    assert [keys for keys, parts in kinds.items() if {int, float} & set(parts)] == []
    assert all(bounds.low > float("-inf") for _, _, bounds in bounded())


def test_whatever_is_given_only_a_usage_error_comes() -> None:
    rng = random.Random(1)
    odd = [None, True, 0, -1, 10**400, 0.5, float("nan"), float("inf"), "", "x", "none", "1e5", "\udcff", b"x", [], [1],
           ["a"], {}, {"a": 1}, {1: 2}, object(), (), set(), Path("p"), Path()]  # fmt: skip
    names = [*option_names(), ("data",), ("train",), ("nonsense",), ("data", "nonsense"), ("data", "path", "deeper")]
    refused = 0
    for _ in range(3000):
        options: dict[str, Any] = {}
        for keys in rng.sample(names, 2):
            options = merge(options, nested(keys, rng.choice(odd)))
        try:
            build(options)
        except UsageError:
            refused += 1
    assert refused > 1000


# Merging and differences ----------------------------------------------------------------------------------------------


def test_later_options_win_and_sections_are_merged() -> None:
    first = {"data": {"batch_size": 3, "path": ["a", "b"]}, "seed": 1}
    second = {"data": {"path": ["c"]}, "train": {"max_steps": 5}}
    merged = merge(first, second)
    assert merged == {"data": {"batch_size": 3, "path": ["c"]}, "seed": 1, "train": {"max_steps": 5}}
    assert first == {"data": {"batch_size": 3, "path": ["a", "b"]}, "seed": 1}
    assert second == {"data": {"path": ["c"]}, "train": {"max_steps": 5}}


def test_later_options_win_however_they_are_spelt() -> None:
    merged = merge({"data": {"batch_size": 3}, "runs-dir": "a"}, {"data": {"batch-size": 4}, "runs_dir": "b"})
    merged = merge(merged, {"data": {"batch_size": 5}})
    assert merged == {"data": {"batch_size": 5}, "runs_dir": "b"}


def test_a_later_corpus_takes_the_place_of_files() -> None:
    files = build({"data": {"path": "a.txt"}}).as_dict()
    assert build(merge(files, {"data": {"corpus": "tiny_shakespeare"}})).data.path == []
    assert build(merge(files, {"data": {"batch_size": 3}})).data.path == ["a.txt"]
    both = merge({}, {"data": {"corpus": "tiny_shakespeare", "path": ["b.txt"]}})
    assert build(both).data.path == ["b.txt"]
    assert build(merge(build({}).as_dict(), files)).data.path == ["a.txt"]
    hub = build({"data": {"hub": "owner/name"}}).as_dict()
    assert build(merge(files, {"data": {"hub": "owner/name"}})) == build(hub)
    assert build(merge(hub, {"data": {"path": "a.txt"}})) == build(files)
    assert build(merge(hub, {"data": {"corpus": "shakespeare"}})).data.hub is None
    assert build(merge(files, hub)) == build(hub)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": {"path": "a", "hub": "b/c"}}, "--data.path and --data.hub exclude each other"),
        ({"data": {"hub_config": "en"}}, "--data.hub-config is an option of --data.hub"),
        ({"data": {"hub_split": "test"}}, "--data.hub-split is an option of --data.hub"),
        *[
            (
                {"data": {"alphabet": "bytes", name: value}},
                f"{option_name(('data', name))} does nothing to --data.alphabet",
            )
            for name, value in {
                "encoding": "latin-1",
                "errors": "skip",
                "newlines": "lf",
                "normalization": "nfc",
                "lowercase": True,
                "min_count": 2,
                "byte_fallback": "true",
            }.items()
        ],
        (
            {"data": {"alphabet": "v.json", "min_count": 2}},
            "--data.min-count does nothing to a vocabulary that is given",
        ),
        ({"data": {"min_count": 2, "byte_fallback": "false"}}, "--data.min-count writes rare characters as bytes"),
        *[
            (
                {"data": {"streaming": True, name: value}},
                f"{option_name(('data', name))} needs to know where the text ends",
            )
            for name, value in {
                "val_fraction": 0.1,
                "test_fraction": 0.1,
                "split_at": "file",
                "shift_epochs": True,
                "shrink": False,
            }.items()
        ],
        ({"data": {"streaming": True}, "train": {"max_epochs": 1}}, "--train.max-epochs needs to know where the text"),
        (
            {"data": {"streaming": True}, "train": {"bptt": "full"}},
            "--train.bptt full needs to know where the text ends",
        ),
        ({"data": {"stream_steps": 3}}, "--data.stream-steps is an option of --data.streaming"),
        ({"data": {"alphabet_from": 3}}, "--data.alphabet-from is an option of --data.streaming"),
        ({"data": {"shuffle_files": True}}, "--data.shuffle-files is an option of --data.streaming"),
        (
            {"data": {"streaming": True, "alphabet": "bytes", "alphabet_from": 3}},
            "--data.alphabet-from does nothing to",
        ),
        ({"data": {"val_path": "v", "val_fraction": 0.1}}, "--data.val-path and --data.val-fraction exclude"),
        ({"data": {"test_path": "v", "test_fraction": 0.1}}, "--data.test-path and --data.test-fraction exclude"),
        ({"data": {"path": "-", "val_path": "-"}}, "Standard input can be read once"),
        ({"data": {"alphabet": "bytes"}, "model": {"kind": "infill"}}, "an infill model restores characters"),
        (
            {"data": {"reset_state": True}, "model": {"kind": "window"}},
            "--data.reset-state is an option of kind recurrent",
        ),
    ],
)
def test_options_of_the_text_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    assert said in message(options)


@pytest.mark.parametrize("mode", ["full", "sliding"])
def test_shifted_epochs_need_windows_with_borders(mode: str) -> None:
    assert "--data.shift-epochs moves the windows' borders" in message(
        {"data": {"shift_epochs": True}, "train": {"bptt": mode}}
    )


def test_a_wrong_section_stays_wrong_when_merged() -> None:
    for broken in (3, None, ["x"]):
        with pytest.raises(UsageError, match="train is a section"):
            build(merge({"train": {"max_steps": 1}}, {"train": broken}))


def test_differences_name_options_and_values() -> None:
    one = build({"data": {"path": "a"}})
    other = build({"data": {"path": "b"}, "seed": 3, "train": {"clip_norm": None}})
    assert differences(one, one) == []
    assert differences(one, other) == [("data.path", ["a"], ["b"]), ("train.clip_norm", 1.0, None), ("seed", 1, 3)]


def test_only_limits_and_logging_may_change_on_resume() -> None:
    names = {".".join(keys) for keys in option_names()}
    assert names >= RESUMABLE
    assert {name for name in names if name.startswith("logging.")} <= RESUMABLE
    assert not any(name.startswith(("model.", "gradients.")) for name in RESUMABLE)
    assert {"seed", "train.learning_rate", "train.precision", "data.path", "data.batch_size"}.isdisjoint(RESUMABLE)


# Names ----------------------------------------------------------------------------------------------------------------


def test_option_names() -> None:
    assert option_name(("data", "batch_size")) == "--data.batch-size"
    assert ("data", "batch_size") in option_names()
    assert ("name",) in option_names()
    assert len(set(option_names())) == len(option_names())
    assert option_names(bool) == [
        ("data", "reset_state"), ("data", "lowercase"), ("data", "streaming"), ("data", "shuffle_files"),
        ("data", "shift_epochs"), ("data", "shrink"), ("model", "bias"), ("model", "tie_embeddings"),
        ("train", "carry_state"),
    ]  # fmt: skip
    assert option_names(bool | None) == [("model", "bidirectional")]
    assert {keys[0] for keys in option_names() if len(keys) == 2} == set(configuration.SECTIONS)


def test_every_option_has_a_line_of_help() -> None:
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(configuration))
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
        documented = {
            before.target.id
            for before, after in zip(cls.body, cls.body[1:], strict=False)
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        }
        sections = set(configuration.SECTIONS)
        assert documented | sections >= {f.name for f in fields(getattr(configuration, cls.name))}, cls.name


def test_nearest() -> None:
    assert nearest("grru", ["gru", "lstm"]) == " Did you mean gru?"
    assert nearest("transformer", ["gru", "lstm"]) == ""
    assert nearest_option("--lenght", ["--length", "--prompt"]) == " Did you mean --length?"
    assert nearest_option("--x", []) == ""


def test_bounds_in_words() -> None:
    assert str(Bounds()) == ""
    assert str(Bounds(low=0, high=1, open_low=True, open_high=True)) == "more than 0 and less than 1"
    assert str(Bounds(high=0.25)) == "at most 0.25"
    assert float("nan") not in Bounds()


# Files ----------------------------------------------------------------------------------------------------------------


def read(tmp_path: Path, content: str | bytes, name: str = "c.yaml") -> dict[str, Any]:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_yaml(file)


def refusal(tmp_path: Path, content: str | bytes, name: str = "c.yaml") -> str:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, content, name)
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value).replace(str(tmp_path / name), name)


def test_empty_files_and_sections_say_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "") == {}
    assert read(tmp_path, "# only a comment\n") == {}
    assert read(tmp_path, "train:\n#  max_steps: 3\nseed: 3\n") == {"seed": 3}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [1\nb: 2\n", "c.yaml, line 2, column 2: not valid YAML (expected ',' or ']', but got ':')."),
        ("train:\n\tmax_steps: 3\n",
         "c.yaml, line 2, column 1: not valid YAML (found character '\\t' that cannot start any token)."),
        ("seed: !!python/object/apply:os.getcwd []\n",
         "c.yaml, line 1, column 7: not valid YAML (could not determine a constructor for the tag "
         "'tag:yaml.org,2002:python/object/apply:os.getcwd')."),
        ("a: 1\n---\nb: 2\n", "c.yaml, line 2, column 1: not valid YAML (but found another document)."),
        ("just words\n", "c.yaml: a configuration is a mapping of sections, this is a str."),
        ("- a\n- b\n", "c.yaml: a configuration is a mapping of sections, this is a list."),
        ("3\n", "c.yaml: a configuration is a mapping of sections, this is a int."),
        (b"seed: \xff\n", "c.yaml, byte 6: a configuration is UTF-8 text, this is not."),
        ("train: {max_steps: 1}\nseed: 2\ntrain: {max_epochs: 1}\n", "c.yaml, line 3: train is given twice."),
        ("train:\n  max_steps: 1\n  max-steps: 2\n", "c.yaml, line 3: max-steps is given twice."),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str | bytes, expected: str) -> None:
    assert refusal(tmp_path, content) == expected


def test_a_file_that_the_yaml_reader_itself_stumbles_over(tmp_path: Path) -> None:
    assert refusal(tmp_path, "name: 2026-13-45\n").startswith("c.yaml: not valid YAML (month must be in 1..12")
    assert refusal(tmp_path, "seed: 1\0\n").startswith("c.yaml: not valid YAML (unacceptable character #x0000")
    assert refusal(tmp_path, "[" * 5000).startswith("c.yaml: not valid YAML (maximum recursion depth")


def test_text_in_place_of_a_configuration_is_explained(tmp_path: Path) -> None:
    for content in ("A story.\nShe said: no: never.\n", "words", b"\xe9t\xe9"):
        assert refusal(tmp_path, content, "story.txt").splitlines()[1] == (
            "If it is text to train on: --data.path story.txt"
        )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no configuration file .*nothing\.yaml\.$"):
        read_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(UsageError, match=r"cannot be read: Is a directory\.$"):
        read_yaml(tmp_path)
