"""What a step needs of memory, against what one really took; what there is; and what is refused for it."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lmapp
import lmapp.run
from lmapp.config import build, merge
from lmapp.errors import UsageError
from lmapp.gradients.decay import ProbeShape
from lmapp.gradients.truncation import Truncation
from lmapp.models import make_model
from lmapp.training import memory
from lmapp.training.optimizers import make_optimizer


def has_peak() -> bool:
    status = Path("/proc/self/status")
    return status.exists() and "VmHWM:" in status.read_text()


# A process of its own, whose peak nothing before it has raised. A short step first, for what is only made once.
SCRIPT = """
import json, sys
import torch
from torch.nn import functional
from lmapp.config import build
from lmapp.models import make_model
from lmapp.training import memory, truncation

torch.set_num_threads(1)
options, rows, steps, symbols = json.loads(sys.argv[1])
config = build(options)
model = make_model(symbols, config.model)
longest = 10 * steps
cut = truncation.resolve(config.train, steps, longest)

def loss(rows, steps):
    tokens = torch.zeros(rows, steps, dtype=torch.int64)
    carried = truncation.cold(model, rows)
    if cut.mode == "sliding":
        carried = carried._replace(tokens=torch.zeros(rows, cut.length - 1, dtype=torch.int64))
    logits, _ = truncation.read(model, tokens, carried, cut)
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").sum()

def peak():  # of this program: that of getrusage is handed on from the one that started it
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

need = memory.needed(model, config.train, cut, rows, steps, longest)
loss(2, 4).backward()
before = peak()
loss(rows, steps).backward()
print(need.step / 1024, peak() - before)
"""

PROBE = """
import json, sys
from dataclasses import replace
import torch
from lmapp.config import build
from lmapp.gradients.decay import ProbeShape, measure
from lmapp.gradients.truncation import Truncation
from lmapp.models import make_model
from lmapp.training import memory

torch.set_num_threads(1)
options, windows, lag, symbols = json.loads(sys.argv[1])
config = build(options)
model = make_model(symbols, config.model)
shape = ProbeShape(windows, 64, lag, 4, 100)

def measured(shape):
    measure(model, torch.zeros(shape.windows, shape.length, dtype=torch.int64), shape)

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

measured(replace(shape, windows=1, max_lag=4))
before = peak()
measured(shape)
taken = peak() - before
need = memory.needed(model, config.train, Truncation(4, "block", 4), 1, 4, 4, shape)
print(need.probe / 1024, taken)
"""


@pytest.mark.skipif(not has_peak(), reason="the system does not say what a process's peak was")
@pytest.mark.parametrize(
    ("model", "train", "shape"),
    [
        ({"cell": "vanilla", "hidden_size": 256}, {"bptt": "full"}, (16, 2000, 60)),
        ({"cell": "gru", "hidden_size": 128, "num_layers": 3}, {}, (16, 1000, 60)),
        ({"cell": "lstm", "hidden_size": 96, "embedding_size": 32}, {}, (16, 1000, 60)),
        ({"cell": "gru", "hidden_size": 32}, {}, (16, 500, 1000)),
        (
            {"cell": "lstm", "hidden_size": 64, "num_layers": 2},
            {"bptt": "sliding", "truncation_length": 40, "stride": 4},
            (16, 80, 60),
        ),
        ({"cell": "lstm", "hidden_size": 128}, {"bptt": "randomised"}, (16, 1000, 60)),
        ({"cell": "gru", "hidden_size": 64, "embedding_size": 1024}, {}, (16, 1000, 60)),
    ],
)
def test_the_estimate_is_within_a_factor_of_two_of_a_step_s_peak(
    model: dict[str, Any], train: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    options = {"model": model, "train": train, "data": {"sequence_length": shape[1]}}
    estimate, measured = in_a_process(SCRIPT, options, *shape)
    assert 0.5 < estimate / measured < 2, (estimate, measured)


@pytest.mark.skipif(not has_peak(), reason="the system does not say what a process's peak was")
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ({"cell": "gru", "hidden_size": 128}, (4, 1000, 60)),
        ({"cell": "lstm", "hidden_size": 512}, (8, 128, 60)),
        ({"cell": "lstm", "hidden_size": 96, "num_layers": 2, "connections": "dense"}, (8, 500, 60)),
        ({"cell": "mingru", "hidden_size": 128}, (8, 512, 60)),
        ({"cell": "gru", "hidden_size": 32}, (64, 50, 500)),
    ],
)
def test_the_estimate_is_within_a_factor_of_two_of_a_measurement_s_peak(
    model: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    estimate, measured = in_a_process(PROBE, {"model": model}, *shape)
    assert 0.5 < estimate / measured < 2, (estimate, measured)


def in_a_process(script: str, options: dict[str, Any], *shape: int) -> tuple[float, float]:
    """What was estimated and what was taken, in kB."""
    arguments = json.dumps([options, *shape])
    done = subprocess.run([sys.executable, "-c", script, arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    estimate, measured = map(float, done.stdout.split())
    assert measured > 40 * 1024  # more than what else a process does
    return estimate, measured


ADAMW = build({}).train


def network(**model: Any) -> Any:
    torch.manual_seed(0)
    return make_model(30, build({"model": {"hidden_size": 16, **model}}).model)


def needed(model: Any, cut: Truncation, rows: int, steps: int, probe: ProbeShape | None = None) -> memory.Need:
    return memory.needed(model, ADAMW, cut, rows, steps, 10 * steps, probe)


def test_it_grows_with_the_characters_and_not_with_how_they_lie() -> None:
    model = network()
    whole = needed(model, Truncation(100, "block", 100), 8, 100)
    assert needed(model, Truncation(100, "block", 100), 16, 100).step == pytest.approx(2 * whole.step)
    assert needed(model, Truncation(800, "full", 800), 1, 800).step == pytest.approx(whole.step, rel=0.1)
    sliding = needed(model, Truncation(20, "sliding", 100, 5), 8, 100)
    assert sliding.step == pytest.approx(whole.step * 20 * 24 / 100)
    assert whole.total == whole.weights + whole.step
    more = needed(network(num_layers=3), Truncation(100, "block", 100), 8, 100)
    assert more.step > 1.3 * whole.step


@pytest.mark.parametrize(
    ("train", "kept"),
    [
        ({}, 2),
        ({"optimizer": "adam"}, 2),
        ({"optimizer": "rmsprop"}, 1),
        ({"optimizer": "rmsprop", "momentum": 0.5}, 2),
        ({"optimizer": "sgd"}, 0),
        ({"optimizer": "sgd", "momentum": 0.5}, 1),
    ],
)
def test_the_weights_are_counted_with_what_the_optimiser_keeps(train: dict[str, Any], kept: int) -> None:
    model, settings = network(), build({"train": train}).train
    count = sum(p.numel() for p in model.parameters())
    assert memory.weights(model, settings) == 4 * (2 + kept) * count
    optimizer = make_optimizer(model, settings)
    model(torch.zeros(2, 8, dtype=torch.int64), model.initial_state(2))[0].sum().backward()
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    assert sum(v.numel() for v in values if isinstance(v, torch.Tensor) and v.dim()) == kept * count


def test_an_embedding_s_outputs_are_counted_only_where_no_table_is_used() -> None:
    narrow, wide = (network(embedding_size=size) for size in (4, 400))
    for rows, steps, table in ((5, 6, False), (8, 16, True)):
        assert (wide.kernels(rows, steps) == ["table+scan"]) == table
        less, more = (needed(model, Truncation(steps, "block", steps), rows, steps).step for model in (narrow, wide))
        assert (more - less) / (rows * steps) == pytest.approx(0 if table else 4 * 396, abs=1)


def test_a_measurement_and_a_step_are_not_made_at_once() -> None:
    model, cut = network(), Truncation(100, "block", 100)
    alone = needed(model, cut, 8, 100)
    assert alone.probe == 0
    little, much = (needed(model, cut, 8, 100, ProbeShape(windows, 64, 200, 4, 100)) for windows in (1, 50))
    assert 0 < little.probe < little.step
    assert little.total == alone.total
    assert much.step == alone.step < much.probe
    assert much.total == much.weights + much.probe
    longer = needed(model, cut, 8, 100, ProbeShape(50, 64, 404, 4, 100))
    assert longer.probe == pytest.approx(2 * much.probe, rel=0.02)


@pytest.mark.parametrize("kind", ["recurrent", "window", "infill"])
def test_asking_changes_nothing(kind: str) -> None:
    model = network(kind=kind, dropout=0.4)
    before = torch.get_rng_state()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    probe = ProbeShape(4, 8, 20, 4, 10) if kind == "recurrent" else None
    assert needed(model, Truncation(64, "block", 64), 8, 64, probe).step > 0
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is None
    assert model.training


# What there is --------------------------------------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1 GiB to be had, in whose files a test may write; this process is in the group /a/b."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("5:cpu:/c\n4:memory:/a/b\n0::/a/b\n")
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    return tmp_path


def limit(system: Path, group: str, text: str) -> None:
    path = system / "cgroup" / group
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


CPU = torch.device("cpu")


def test_what_the_system_has(system: Path) -> None:
    assert memory.available(CPU) == 2**30
    (system / "proc" / "meminfo").write_text("MemTotal: 2097152 kB\n")

    assert memory.available(CPU) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("group", ["a/b/memory.max", "a/memory.max", "memory.max", "memory/a/b/memory.limit_in_bytes"])
def test_the_limits_of_this_process_s_groups(system: Path, group: str) -> None:
    limit(system, group, "123456789\n")
    assert memory.available(CPU) == 123456789


@pytest.mark.parametrize(
    ("group", "names", "prefix"),
    [
        ("a/b", ("memory.max", "memory.current"), ""),
        ("memory/a", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_what_a_group_has_in_use_is_not_available(
    system: Path, group: str, names: tuple[str, str], prefix: str
) -> None:
    """But for copies of files, which make room."""
    limit(system, f"{group}/{names[0]}", "1000\n")
    limit(system, f"{group}/{names[1]}", "700\n")
    assert memory.available(CPU) == 300
    stat = f"anon 5\n{prefix}inactive_file 40\n{prefix}active_file 60\ninactive_anon 7\nunevictable 9\n"
    limit(system, f"{group}/memory.stat", stat)
    assert memory.available(CPU) == 400
    limit(system, f"{group}/{names[1]}", "1200\n")
    assert memory.available(CPU) == 0


def test_limits_that_are_none(system: Path) -> None:
    limit(system, "a/b/memory.max", "max\n")
    limit(system, "memory/a/memory.limit_in_bytes", "9223372036854771712\n")
    limit(system, "c/memory.max", "5\n")  # somebody else's
    assert memory.available(CPU) == 2**30


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({}, ["--train.bptt block on", "8 rows of 16 characters", "--data.batch-size"]),
        ({"bptt": "full"}, ["--train.bptt full on", "8 rows of 375 characters", "It grows with the text"]),
        ({"bptt": "sliding"}, ["--train.bptt sliding on", "larger --train.stride", "--train.truncation-length"]),
    ],
)
def test_a_step_that_does_not_fit_is_refused(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any], words: list[str]
) -> None:
    (tmp_path / "text.txt").write_text(real_text[:3000], encoding="utf-8")
    options = {
        "data": {"path": "text.txt", "batch_size": 8, "sequence_length": 16, "val_fraction": 0},
        "model": {"hidden_size": 32},
        "train": {"max_steps": 1, **train},
        "logging": {"wandb": "disabled"},
        "name": "run",
    }
    asked = []

    def little(device: torch.device) -> int:
        asked.append(device.type)
        return 200_000 if len(asked) > 1 else 10**9  # once for the weights

    monkeypatch.setattr(memory, "available", little)
    with pytest.raises(UsageError) as caught:
        lmapp.train(options, quiet=True)
    message = str(caught.value)
    assert all(word in message for word in ["MiB of memory", "0 MiB are available", *words]), message
    assert len(message.splitlines()) <= 3
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["window", "recurrent"])
def test_what_could_be_smaller_is_an_option_of_the_network(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "text.txt").write_text(real_text[:3000], encoding="utf-8")
    options = {"data": {"path": "text.txt"}, "model": {"kind": kind}, "logging": {"wandb": "disabled"}}
    for there in ([10], [10**9, 10]):  # for the weights, and for a step
        left = iter(there)
        monkeypatch.setattr(memory, "available", lambda device, left=left: next(left))
        with pytest.raises(UsageError) as caught:
            lmapp.train(options, quiet=True)
        message = str(caught.value)
        assert ("--model.window" in message) == (kind == "window")
        assert ("--model.num-layers" in message) == (kind == "recurrent" and len(there) == 1)
        assert len(message.splitlines()) <= 3


def test_a_measurement_that_does_not_fit_is_refused(
    tmp_path: Path, real_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the weights and a step need is there, and no more."""
    (tmp_path / "text.txt").write_text(real_text[:20_000], encoding="utf-8")
    options: dict[str, Any] = {
        "data": {"path": "text.txt", "batch_size": 4, "sequence_length": 50, "val_fraction": 0.4},
        "model": {"hidden_size": 16},
        "train": {"max_steps": 1},
        "logging": {"wandb": "disabled"},
        "name": "run",
    }
    asked: list[memory.Need] = []
    estimate = memory.needed

    def watched(*arguments: Any, **options: Any) -> memory.Need:
        asked.append(estimate(*arguments, **options))
        return asked[-1]

    monkeypatch.setattr(memory, "needed", watched)
    monkeypatch.setattr(memory, "available", lambda device: asked[0].weights + asked[0].step if asked else 10**9)
    with pytest.raises(UsageError) as caught:
        lmapp.train(options, quiet=True)
    message = str(caught.value)
    words = ["measure gradient decay up to lag 100\non 8 windows", "--gradients.max-lag", "--gradients.every-steps 0"]
    assert all(word in message for word in words), message
    assert len(message.splitlines()) <= 3
    assert not (tmp_path / "runs").exists()
    asked.clear()
    assert lmapp.train(merge(options, {"gradients": {"every_steps": 0}}), quiet=True).metrics["steps"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_a_step_frees_is_there_for_the_next() -> None:
    """Pages of 64 MiB that were given back to the system are touched for the first time again."""
    script = """
import resource, torch
from lmapp.training.memory import kept_between_steps
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**24).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
with kept_between_steps():
    for _ in range(4):
        faults()
    print(faults())
print(faults())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    kept, given_back = map(int, done.stdout.split())
    if platform.libc_ver()[0] == "glibc":
        assert kept < 100
        assert given_back > 1000 or _huge_pages()


def _huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.is_file() and "[always]" in setting.read_text()
