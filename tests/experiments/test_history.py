import json
import time

import pytest

from lmapp.errors import LmappError
from lmapp.experiments.history import History, find, read_lines


def write_run(directory, **files):
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name.replace("_", ".", 1)).write_text(text, encoding="utf-8")
    return directory


def test_files_of_a_run(tmp_path):
    run = write_run(
        tmp_path / "first",
        config_yaml="model:\n  cell: gru\n  hidden_size: 8\n",
        metrics_jsonl='{"step": 0, "decay/half_life": 3.5}\n{"step": 10, "train/loss": 2.5, "val/loss": "nan"}\n',
        decay_jsonl='{"step": 0, "layer": "all"}\n',
        summary_json='{"state": "finished"}',
    )
    (run / "clip_events.jsonl").write_text('{"kind": "clip", "text": "a\u2028b"}\n', encoding="utf-8")
    history = History(run)
    assert history.name == "first"
    assert history.config == {"model": {"cell": "gru", "hidden_size": 8}}
    assert [line["step"] for line in history.metrics] == [0, 10]
    assert history.column("train/loss") == ([10], [2.5])
    assert str(history.column("val/loss")[1][0]) == "nan"
    assert history.decay == [{"step": 0, "layer": "all"}]
    assert history.clip_events == [{"kind": "clip", "text": "a\u2028b"}]
    assert history.summary == {"state": "finished"}


def test_files_that_do_not_exist_are_empty(tmp_path):
    history = History(write_run(tmp_path / "young", config_yaml=""))
    assert (history.config, history.summary) == ({}, {})
    assert (history.metrics, history.decay, history.clip_events) == ([], [], [])


@pytest.mark.parametrize("rest", ['{"step": 3', "{", '{"text": "é'[:-1], '{"step": 3, "a": {"b": 1}', "   "])
def test_an_unfinished_last_line_is_no_line_yet(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + rest.encode())
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_a_character_cut_in_the_middle_is_no_line_yet(tmp_path):
    path = tmp_path / "clip_events.jsonl"
    path.write_bytes('{"step": 1}\n{"text": "é'.encode()[:-1])
    assert read_lines(path) == [{"step": 1}]


def test_a_whole_last_line_counts_without_its_line_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    "bad", ['{"step": 2', "[2]", "2", "", "\x00\x00", '{"step": 2}{"step": 3}', '{"step": 2},{"a": 3}']
)
def test_a_damaged_line_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n{{"st')
    with pytest.raises(LmappError) as raised:
        read_lines(path)
    message = str(raised.value)
    assert f"{path} is damaged in line 2" in message
    assert message.count("\n") <= 2


def test_bytes_that_are_no_text_are_named_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 3}\n')
    with pytest.raises(LmappError, match="line 2"):
        read_lines(path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_summary_is_named(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    history = History(tmp_path)
    with pytest.raises(LmappError, match=r"summary\.json"):
        _ = history.summary


@pytest.mark.parametrize("text", ["a: [1\nb: 2\n", "just words"])
def test_a_damaged_config_is_named(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(LmappError, match=r"config\.yaml"):
        _ = History(tmp_path).config


def test_find_takes_a_directory_a_name_and_a_checkpoint(tmp_path, monkeypatch):
    run = write_run(tmp_path / "runs" / "shakespeare-gru", config_yaml="")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best.ckpt").write_bytes(b"")
    runs = tmp_path / "runs"
    assert find(str(run), runs) == run
    assert find("shakespeare-gru", runs) == run
    assert find("shakespeare-gru", str(runs)) == run
    assert find(str(run / "checkpoints" / "best.ckpt"), runs) == run
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shakespeare-gru").mkdir()  # a directory of that name that is no run does not hide the run
    assert find("shakespeare-gru", runs) == run


def test_an_unknown_run_names_the_nearest(tmp_path):
    for name in ("shakespeare-gru", "shakespeare-lstm", "war-and-peace"):
        write_run(tmp_path / name, metrics_jsonl="")
    with pytest.raises(LmappError) as raised:
        find("shakespear-gru", tmp_path)
    message = str(raised.value)
    assert "'shakespear-gru'" in message
    assert "Nearest: shakespeare-gru" in message
    assert "war-and-peace" not in message
    assert message.count("\n") <= 2


@pytest.mark.parametrize("exists", [True, False])
def test_without_runs_it_is_said_how_to_get_one(tmp_path, exists):
    runs = tmp_path / "runs"
    if exists:
        runs.mkdir()
    with pytest.raises(LmappError, match="lmapp train"):
        find("any", runs)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "text").mkdir()
    write_run(tmp_path / "runs" / "one", config_yaml="")
    with pytest.raises(LmappError, match="not a run's directory"):
        find(str(tmp_path / "text"), tmp_path / "runs")


def test_half_a_million_lines_are_read_in_seconds(tmp_path):
    line = {f"train/{name}": 1.23456789 for name in "abcdefgh"} | {"characters": 123456, "seconds": 12.5}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(10_000)))
    start = time.perf_counter()
    for _ in range(5):
        assert len(read_lines(path)) == 10_000
    assert (time.perf_counter() - start) * 10 < 10  # seconds for 50 runs
