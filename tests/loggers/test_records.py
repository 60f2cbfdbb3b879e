"""The run's own files: appended, cut back, never torn, and honest about a disk that is full."""

import errno
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmapp.errors import LmappError
from lmapp.loggers.records import (
    CLIP_EVENTS,
    DECAY,
    METRICS,
    SAMPLES,
    SUMMARY,
    LocalLogger,
    Records,
    read_lines,
)
from lmapp.units import jsonable


@pytest.fixture
def records(tmp_path: Path) -> Any:
    found = Records(tmp_path)
    yield found
    found.close()


# Appending ------------------------------------------------------------------------------------------------------------


def test_a_line_is_in_the_file_at_once(records: Records) -> None:
    records.append_json(METRICS, {"step": 1, "train/loss": 2.5})
    records.append(SAMPLES, "caf\u00e9 \u2192\r\n")
    assert (records.directory / METRICS).read_text(encoding="utf-8") == '{"step": 1, "train/loss": 2.5}\n'
    assert (records.directory / SAMPLES).read_bytes() == "caf\u00e9 \u2192\r\n".encode()


def test_appending_goes_on_where_another_process_ended(tmp_path: Path) -> None:
    for step in range(3):
        records = Records(tmp_path)
        records.append_json(METRICS, {"step": step})
        records.close()
    assert [line["step"] for line in read_lines(tmp_path / METRICS)] == [0, 1, 2]


def test_a_text_of_any_kind_stays_one_line(records: Records) -> None:
    text = 'a\n\nb\r\nc\u2028d\u0085"\\\x00\ufffd\U0001f600'
    records.append_json(CLIP_EVENTS, {"text": text})
    records.append_json(CLIP_EVENTS, {"text": "next"})
    assert [line["text"] for line in read_lines(records.directory / CLIP_EVENTS)] == [text, "next"]


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / METRICS)) == []


# Numbers --------------------------------------------------------------------------------------------------------------


def test_numbers_json_cannot_spell_become_words_however_deep() -> None:
    value = {
        "a": math.nan,
        "b": [math.inf, -math.inf, 1.5, {"c": (math.nan, 2)}],
        "d": "nan",
        "e": None,
        "f": True,
        "g": np.float64("inf"),
        "h": 1e308,
    }
    safe = jsonable(value)
    assert safe == {
        "a": "nan",
        "b": ["inf", "-inf", 1.5, {"c": ["nan", 2]}],
        "d": "nan",
        "e": None,
        "f": True,
        "g": "inf",
        "h": 1e308,
    }
    json.dumps(safe, allow_nan=False)


def test_numbers_keep_every_digit(records: Records) -> None:
    numbers = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 2**53 + 1]
    records.append_json(METRICS, {"numbers": numbers})
    assert next(iter(read_lines(records.directory / METRICS)))["numbers"] == numbers


# Cutting back ---------------------------------------------------------------------------------------------------------


def test_every_file_is_cut_back_to_what_it_held(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.append_json(METRICS, {"step": 1})
    records.append(SAMPLES, "\u00e9" * 5)
    sizes = records.sizes()
    assert sizes == {METRICS: 12, SAMPLES: 10}
    before = {name: (tmp_path / name).read_bytes() for name in sizes}
    records.append_json(METRICS, {"step": 2})
    records.append(SAMPLES, "more")
    records.append_json(CLIP_EVENTS, {"step": 2})
    (tmp_path / "config.yaml").write_text("kept")
    records.close()
    again = Records(tmp_path)
    assert again.cut_back(sizes) == []
    assert {name: (tmp_path / name).read_bytes() for name in sizes} == before
    assert (tmp_path / CLIP_EVENTS).read_bytes() == b""
    assert (tmp_path / "config.yaml").read_text() == "kept"
    again.append_json(METRICS, {"step": 2})
    again.close()
    assert [line["step"] for line in read_lines(tmp_path / METRICS)] == [1, 2]


def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n{"step": 2, "train/lo')
    assert Records(tmp_path).cut_back({METRICS: 12}) == []
    assert [line["step"] for line in read_lines(tmp_path / METRICS)] == [1]


def test_files_that_lack_bytes_are_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n')
    assert Records(tmp_path).cut_back({METRICS: 40, DECAY: 5, SAMPLES: 0}) == [METRICS, DECAY]
    assert (tmp_path / METRICS).read_bytes() == b'{"step": 1}\n'
    assert not (tmp_path / DECAY).exists()


# The summary ----------------------------------------------------------------------------------------------------------


def test_the_summary_is_replaced_whole_or_not_at_all(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write_summary({"state": "running", "best": None})
    records.write_summary({"state": "finished", "best": {"val/loss": math.inf}})
    path = records.directory / SUMMARY
    assert json.loads(path.read_text(encoding="utf-8")) == {"state": "finished", "best": {"val/loss": "inf"}}
    seen = []

    def killed(source: Path, target: Path) -> None:
        seen.append((json.loads(Path(source).read_text(encoding="utf-8")), json.loads(Path(target).read_text())))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(LmappError, match=r"summary\.json could not be written"):
        records.write_summary({"state": "new"})
    assert seen == [({"state": "new"}, {"state": "finished", "best": {"val/loss": "inf"}})]
    assert [p.name for p in records.directory.iterdir()] == [SUMMARY]


# A full disk ----------------------------------------------------------------------------------------------------------


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


def discard(records: Records) -> None:
    """Close every file, whatever cannot be written any more."""
    for file in records._files.values():
        with suppress(OSError):
            file.close()


@needs_full
def test_a_full_disk_is_an_error_with_the_file_s_name(tmp_path: Path) -> None:
    (tmp_path / METRICS).symlink_to("/dev/full")
    records = Records(tmp_path)
    with pytest.raises(LmappError) as caught:
        records.append_json(METRICS, {"step": 1})
    assert METRICS in str(caught.value)
    assert os.strerror(errno.ENOSPC) in str(caught.value)
    assert caught.value.exit_code == 1
    discard(records)


@needs_full
def test_closing_after_a_full_disk_raises_nothing_more(tmp_path: Path) -> None:
    (tmp_path / METRICS).symlink_to("/dev/full")
    records = Records(tmp_path)
    with pytest.raises(LmappError):
        records.append_json(METRICS, {"step": 1})
    records.close()


@needs_full
def test_a_full_disk_spoils_no_other_file(tmp_path: Path) -> None:
    (tmp_path / METRICS).symlink_to("/dev/full")
    records = Records(tmp_path)
    records.append(SAMPLES, "before ")
    with pytest.raises(LmappError):
        records.append_json(METRICS, {"step": 1})
    records.append(SAMPLES, "after")
    assert (tmp_path / SAMPLES).read_text(encoding="utf-8") == "before after"
    discard(records)


def test_a_directory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LmappError, match=METRICS):
        Records(tmp_path / "gone").append(METRICS, "x")
    with pytest.raises(LmappError, match=SUMMARY):
        Records(tmp_path / "gone").write_summary({})


# Lightning's side -----------------------------------------------------------------------------------------------------


def test_the_logger_writes_numbers_under_their_names_with_the_axes_first(records: Records) -> None:
    logger = LocalLogger(records)
    logger.log_metrics(
        {
            "train/characters": 640,
            "train/seconds": 1.5,
            "train/loss": torch.tensor(2.0),
            "val/loss": np.float32(0.5),
            "gradient/norm": math.inf,
            "decay/curves": [{"step": 1}],
            "text": "left out",
            "vector": torch.ones(3),
        },
        step=10,
    )
    logger.log_hyperparams({"anything": 1})
    (line,) = read_lines(records.directory / METRICS)
    assert line == {
        "step": 10,
        "characters": 640,
        "seconds": 1.5,
        "train/characters": 640,
        "train/seconds": 1.5,
        "train/loss": 2.0,
        "val/loss": 0.5,
        "gradient/norm": "inf",
    }
    assert list(line)[:3] == ["step", "characters", "seconds"]
    assert isinstance(line["characters"], int)
    assert (logger.name, logger.version) == ("local", records.directory.name)
