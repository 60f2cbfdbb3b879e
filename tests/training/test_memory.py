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
from lmapp.config import build
from lmapp.errors import UsageError
from lmapp.gradients.decay import Truncation
from lmapp.models import make_model
from lmapp.training import memory


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
cut = truncation.resolve(config.train, steps)

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

need = memory.needed(model, cut, rows, steps, True)
loss(2, 4).backward()
before = peak()
loss(rows, steps).backward()
print(need.step / 1024, peak() - before)
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
    ],
)
def test_the_estimate_is_within_a_factor_of_two_of_a_step_s_peak(
    model: dict[str, Any], train: dict[str, Any], shape: tuple[int, int, int]
) -> None:

    options = {"model": model, "train": train, "data": {"sequence_length": shape[1]}}
    arguments = json.dumps([options, *shape])
    done = subprocess.run([sys.executable, "-c", SCRIPT, arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    estimate, measured = map(float, done.stdout.split())
    assert measured > 40 * 1024  # kB: more than what else a process does
    assert 0.5 < estimate / measured < 2, (estimate, measured)


def network(**model: Any) -> Any:
    torch.manual_seed(0)
    return make_model(30, build({"model": {"hidden_size": 16, **model}}).model)


def test_it_grows_with_the_characters_and_not_with_how_they_lie() -> None:
    model = network()
    whole = memory.needed(model, Truncation(100, "block", 100), 8, 100, True)
    assert memory.needed(model, Truncation(100, "block", 100), 16, 100, True).step == pytest.approx(2 * whole.step)
    assert memory.needed(model, Truncation(800, "full", 800), 1, 800, True).step == pytest.approx(whole.step, rel=0.1)
    sliding = memory.needed(model, Truncation(20, "sliding", 100, 5), 8, 100, True)
    assert sliding.step == pytest.approx(whole.step * 20 * 24 / 100)
    assert whole.weights == 16 * sum(p.numel() for p in model.parameters())
    assert whole.total == whole.weights + whole.step
    more = memory.needed(network(num_layers=3), Truncation(100, "block", 100), 8, 100, True)
    assert more.step > 1.3 * whole.step


@pytest.mark.parametrize("kind", ["recurrent", "window", "infill"])
def test_asking_changes_nothing(kind: str) -> None:
    model = network(kind=kind, dropout=0.4)
    before = torch.get_rng_state()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    assert memory.needed(model, Truncation(64, "block", 64), 8, 64, True).step > 0
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
