"""The README's commands and every config are run as they stand there, on a small text and for a few steps."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = ["--train.max-steps", "6", "--train.val-every-steps", "3", "--model.hidden-size", "16"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, real_text: str) -> Path:
    """An empty folder with the configs and the texts that the README speaks of."""
    directory = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(ROOT / "configs", directory / "configs")
    (directory / "my.txt").write_text(real_text[:12_000], encoding="utf-8")
    (directory / "other.txt").write_text(real_text[2_000:5_000], encoding="utf-8")
    (directory / "books").mkdir()
    for name in ("one", "two"):
        (directory / "books" / f"{name}.txt").write_text(real_text[:6_000], encoding="utf-8")
    import gzip
    import json

    rows = "".join(json.dumps({"text": part}) + "\n" for part in real_text[:12_000].split("\n\n"))
    (directory / "my.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return directory


def run(arguments: list[str], directory: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        arguments,
        input=stdin,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_commands_of_the_readme(place: Path) -> None:
    """In order: what one command makes, a later one uses."""
    tools = Path(sys.executable).parent
    done = []
    for line in commands():
        words = shlex.split(line)
        stdin = None
        if "<" in words:
            words, stdin = words[:-2], (place / words[-1]).read_text(encoding="utf-8")
        if words[0] == "make":
            continue  # see below, and the slow test of `make train`
        if words[:2] == ["lmapp", "train"]:
            words += SHORT if "--resume" not in words else ["--train.max-steps", "9"]
            if "--resume" in words:
                del words[words.index("--train.max-minutes") : words.index("--train.max-minutes") + 2]
        if words[0] == "wandb":
            if words[1] == "leet":
                words[2:2] = ["inspect", "--json"]  # the same without a terminal
            else:
                continue  # sends to a server
        result = run([str(tools / words[0]), *words[1:]], place, stdin)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        done.append(line)
    assert len(done) >= 12


def test_python_of_the_readme(place: Path) -> None:
    code = (
        "".join(blocks("python"))
        .replace('"max_minutes": 2', '"max_steps": 5')
        .replace('"train":', '"model": {"hidden_size": 16}, "logging": {"wandb": "disabled"}, "train":')
    )
    result = run([sys.executable, "-c", code], place)
    assert result.returncode == 0, result.stderr
    assert "runs/my-gru-" in result.stdout


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_trains(config: Path, place: Path) -> None:
    lines = config.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40
    command = shlex.split(lines[0].removeprefix("#"))
    text = ["--data.path", "my.txt"] if config.name.startswith("recipe_") else []
    assert command == ["lmapp", "train", f"configs/{config.name}", *text]
    import lmapp
    from lmapp.config import build, merge, read_yaml

    # As it stands, but for the text, and a few steps of it.
    changes: dict[str, Any] = {
        "data": {"path": [str(place / "my.txt")], "cache_dir": str(place / "cache")},
        "train": {"max_steps": 2, "max_minutes": None},
        "logging": {"wandb": "disabled"},
        "runs_dir": str(place / "configs-runs"),
    }
    result = lmapp.train(build(merge(read_yaml(config), changes)), quiet=True)
    assert result.metrics["steps"] == 2


def test_the_page_on_gradients_names_what_exists() -> None:
    from lmapp.config import option_name, option_names

    page = (ROOT / "lmapp" / "gradients" / "README.md").read_text(encoding="utf-8")
    options = set(re.findall(r"--(?:data|model|train|gradients|logging)\.[a-z-]+", page))
    assert len(options) > 10
    assert options <= {option_name(keys) for keys in option_names()}
    configs = set(re.findall(r"configs/[a-z_0-9]+\.yaml", page))
    assert configs
    assert all((ROOT / config).is_file() for config in configs)
    assert "(lmapp/gradients/README.md)" in README


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    spoken = " ".join(re.findall(r"`(make [^`]*)`", prose))
    named = set(re.findall(r"make ([a-z-]+)", f"{spoken} {' '.join(blocks('sh'))}"))
    assert {"train", "test", "check", "bench", "test-all"} <= named <= targets


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make ([a-z-]+)(?: {2,})", shown, flags=re.MULTILINE)) == targets


@pytest.mark.slow
def test_make_train_in_a_fresh_clone(tmp_path: Path) -> None:
    """The first command of the README, word for word, then a shorter run with arguments."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    result = subprocess.run(["make", "train"], cwd=clone, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert re.search(r"best (and last|validation)", result.stdout)
    arguments = ["make", "train", "MODEL=gru", "ARGS=--data.path README.md --train.max-steps 5 --model.hidden-size 16"]
    short = subprocess.run(arguments, cwd=clone, capture_output=True, text=True, timeout=300, check=False)
    assert short.returncode == 0, short.stdout + short.stderr
    assert "making .venv" not in short.stdout
