import json
import math

import pytest
from rich.console import Console

from lmapp.errors import LmappError
from lmapp.experiments.compare import compare


def write_run(directory, config="", metrics=(), summary=None, events=None, tail=""):
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(config)
    if metrics is not None:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + tail)
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    if events is not None:
        (directory / "clip_events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def line(step, **values):
    return {"step": step, "characters": 1000 * step, "seconds": 0.5 * step, **values}


def validated(step, loss):
    return line(step, **{"val/loss": loss, "val/perplexity": math.exp(loss), "val/bits_per_char": loss / math.log(2)})


def test_figures_of_a_finished_run(tmp_path):
    run = write_run(
        tmp_path / "gru",
        metrics=[
            {"step": 0, "decay/half_life": 1.0, "decay/half_life_censored": 0},
            validated(10, 2.0),
            validated(20, 1.5),
            validated(30, 1.6),
            line(40, **{"decay/half_life": 80.0, "decay/half_life_censored": 1.0}),
        ],
        summary={
            "best": {"step": 20, "val/loss": 1.5},
            "last": {"step": 30, "val/loss": 1.6},
            "parameters": 77,
            "characters": 40_000,
            "seconds": 20.0,
            "steps": 40,
            "state": "finished",
        },
        events=[{"kind": "clip"}] * 10 + [{"kind": "nonfinite"}],
    )
    (row,) = compare([run]).rows
    assert (row.name, row.state, row.step, row.best_step) == ("gru", "finished", 40, 20)
    assert (row.best_loss, row.last_loss) == (1.5, 1.6)
    assert row.best_perplexity == pytest.approx(math.exp(1.5))
    assert row.last_perplexity == pytest.approx(math.exp(1.6))
    assert row.best_bits_per_char == pytest.approx(1.5 / math.log(2))
    assert row.last_bits_per_char == pytest.approx(1.6 / math.log(2))
    assert (row.parameters, row.characters, row.seconds, row.chars_per_second) == (77, 40_000, 20.0, 2000.0)
    assert row.clip_share == 0.25
    assert (row.half_life, row.half_life_censored) == (80.0, True)


def test_a_killed_run_is_read_from_its_lines_and_marked(tmp_path):
    run = write_run(
        tmp_path / "killed",
        metrics=[validated(10, 2.0), validated(20, 2.5), line(30)],
        summary={"parameters": 5, "state": "running", "steps": 20, "characters": 20_000, "seconds": 10.0},
        tail='{"step": 4',
    )
    (row,) = compare([run]).rows
    assert row.state == "unfinished"
    assert (row.step, row.best_step, row.best_loss, row.last_loss) == (30, 10, 2.0, 2.5)
    assert (row.parameters, row.characters, row.seconds) == (5, 30_000, 15.0)
    assert row.clip_share is None
    assert row.half_life is None


def test_a_summary_older_than_the_last_line_does_not_count(tmp_path):
    summary = {"best": {"step": 10, "val/loss": 2.0}, "steps": 10, "state": "interrupted", "parameters": 5}
    run = write_run(tmp_path / "resumed", metrics=[validated(10, 2.0), validated(20, 1.0)], summary=summary)
    (row,) = compare([run]).rows
    assert (row.state, row.best_loss, row.characters, row.parameters) == ("unfinished", 1.0, 20_000, 5)


def test_a_summary_that_says_running_is_no_end(tmp_path):
    run = write_run(tmp_path / "a", metrics=[line(10)], summary={"steps": 10, "state": "running", "best": None})
    assert compare([run]).rows[0].state == "unfinished"


def test_a_run_that_has_not_begun(tmp_path):
    (row,) = compare([write_run(tmp_path / "new", metrics=None)]).rows
    assert (row.state, row.step, row.best_loss, row.characters, row.chars_per_second) == (
        "unfinished",
        0,
        None,
        None,
        None,
    )


def test_clip_share_without_events_is_the_logged_share_over_all_steps(tmp_path):
    run = write_run(
        tmp_path / "a",
        metrics=[line(10, **{"gradient/clip_fraction": 1.0}), line(40, **{"gradient/clip_fraction": 0.2})],
    )
    assert compare([run]).rows[0].clip_share == pytest.approx((10 * 1.0 + 30 * 0.2) / 40)


def test_best_validation_first_and_none_last(tmp_path):
    runs = [
        write_run(tmp_path / "b-none", metrics=[line(5)]),
        write_run(tmp_path / "worse", metrics=[validated(5, 1.9)]),
        write_run(tmp_path / "a-nan", metrics=[line(5, **{"val/loss": "nan"})]),
        write_run(tmp_path / "better", metrics=[validated(5, 1.1), line(6, **{"val/loss": "inf"})]),
    ]
    assert [row.name for row in compare(runs).rows] == ["better", "worse", "a-nan", "b-none"]


def test_infill_models_are_never_ranked_with_the_others(tmp_path):
    infill = "model: {kind: infill}\n"
    restored = [line(step, **{"val/infill_loss": loss}) for step, loss in ((10, 0.7), (20, 0.5), (30, 0.6))]
    summary = {"best": {"step": 8, "val/infill_loss": 0.9}, "last": {"step": 9, "val/infill_loss": 1.1}, "steps": 9}
    runs = [
        write_run(tmp_path / "new", infill, [line(5)]),
        write_run(tmp_path / "summed", infill, [line(9)], {**summary, "state": "finished"}),
        write_run(tmp_path / "restored", infill, restored),
        write_run(tmp_path / "gru", metrics=[validated(5, 1.9)]),
        write_run(tmp_path / "window", "model: {kind: window}\n", [validated(5, 1.8)]),
    ]
    comparison = compare(runs)
    assert [row.name for row in comparison.rows] == ["window", "gru", "restored", "summed", "new"]
    window, _, third, fourth, last = comparison.rows
    assert (window.infill, window.best_loss, window.best_infill_loss, window.last_infill_loss) == (
        False,
        1.8,
        None,
        None,
    )
    for row, best, final, step in ((third, 0.5, 0.6, 20), (fourth, 0.9, 1.1, 8), (last, None, None, None)):
        assert row.infill
        assert (row.best_infill_loss, row.last_infill_loss, row.best_step) == (best, final, step)
        assert (row.best_loss, row.best_perplexity, row.best_bits_per_char, row.last_perplexity) == (None,) * 4
    document = comparison.as_dict()["runs"][2]
    assert (document["infill"], document["best_infill_loss"], document["best_loss"]) == (True, 0.5, None)
    text = rendered(comparison, 100)
    language, rest = text.split("Infill loss (nats per masked character)")
    restored_ones, cost = rest.split("Cost and gradients")
    assert "1.8000" in language
    assert "restored" not in language
    assert "0.5000" in restored_ones
    assert "perplexity" not in restored_ones
    assert "gru" not in restored_ones
    assert all(row.name in cost for row in comparison.rows)


def test_without_infill_models_nothing_is_said_of_them(tmp_path):
    runs = [write_run(tmp_path / "a", metrics=[validated(5, 1.9)])]
    assert "Infill" not in rendered(compare(runs), 80)
    runs = [write_run(tmp_path / "b", "model: {kind: infill}\n", [line(5, **{"val/infill_loss": 0.5})])]
    assert "Validation loss" not in rendered(compare(runs), 80)


def test_only_options_that_differ_are_listed_in_the_order_of_the_rows(tmp_path):
    first = "name: x\ndata:\n  path: [a, b]\nmodel:\n  cell: gru\n  hidden_size: 8\ntrain:\n  clip_norm: null\n"
    second = (
        "name: y\ndata:\n  path: [a, b]\nmodel:\n  cell: lstm\n  hidden_size: 8\ntrain:\n  clip_norm: 1.0\nseed: 3\n"
    )
    runs = [
        write_run(tmp_path / "x", first, [validated(1, 3.0)]),
        write_run(tmp_path / "y", second, [validated(1, 2.0)]),
    ]
    comparison = compare(runs)
    assert [row.name for row in comparison.rows] == ["y", "x"]
    assert comparison.differences == {"model.cell": ("lstm", "gru"), "train.clip_norm": (1.0, None), "seed": (3, None)}


def test_a_run_named_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "a", metrics=[validated(1, 3.0)])
    assert len(compare([run, str(run), run / "." / ""]).rows) == 1


def test_no_runs_give_no_rows(tmp_path):
    comparison = compare([])
    assert comparison.rows == ()
    assert comparison.as_dict() == {"runs": []}
    comparison.tables()


def test_damage_is_named(tmp_path):
    run = write_run(tmp_path / "a", metrics=[line(1)], tail="oops\n")
    with pytest.raises(LmappError, match=r"metrics\.jsonl is damaged in line 2"):
        compare([run])


def test_as_dict_is_plain_json(tmp_path):
    runs = [
        write_run(tmp_path / "huge", "model: {cell: gru, layers: [1, 2], x: .inf}\n", [validated(1, 5.0)]),
        write_run(tmp_path / "b", "model: {cell: lstm, layers: [1], x: 1.0}\n", [line(2, **{"val/loss": 800.0})]),
    ]
    document = json.loads(json.dumps(compare(runs).as_dict(), allow_nan=False))
    assert [run["name"] for run in document["runs"]] == ["huge", "b"]
    assert document["runs"][0]["differences"] == {"model.cell": "gru", "model.layers": [1, 2], "model.x": "inf"}
    assert document["runs"][1]["best_perplexity"] == "inf"
    assert document["runs"][0]["best_loss"] == 5.0


@pytest.fixture
def many(tmp_path):
    options = "".join(f"  long_option_name_{number}: {{}}\n" for number in range(12))
    runs = []
    for number, name in enumerate(("short", "tiny-shakespeare-vanilla-orthogonal-20250101-101112", "c")):
        config = f"data:\n  path: 'my/[bold]texts{number}/*.txt'\ntrain:\n{options.format(*range(number, 12 + number))}"
        metrics = [
            validated(99_000, 1.51234 + number),
            line(100_000, **{"decay/half_life": 12.3456, "decay/half_life_censored": number % 2}),
        ]
        runs.append(write_run(tmp_path / name, config, metrics, summary={"parameters": 12_345_678}))
    return compare(runs)


def rendered(comparison, width):
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        for table in comparison.tables(width):
            console.print(table)
    return capture.get()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_tables_fit_the_terminal_and_no_value_is_broken(many, width):
    text = rendered(many, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for value in ("1.5123", "2.5123", "3.5123", "99,000", "12.3 M", "100 M", "13:53:20", "2,000", "12.3", "unfinished"):
        assert value in text
    assert "my/[bold]texts0/*.txt" in text
    assert f"{math.exp(1.51234):.3f}" in text


def test_every_option_that_differs_is_in_some_table(many):
    words = rendered(many, 80).split()
    assert sum(word.isdigit() and 0 <= int(word) < 14 for word in words) >= 12 * 3


def test_half_life_beyond_the_window_is_shown_as_such(tmp_path):
    run = write_run(tmp_path / "a", metrics=[line(1, **{"decay/half_life": 128.0, "decay/half_life_censored": 1.0})])
    assert "> 128" in rendered(compare([run]), 80)


def test_events_after_the_last_line_of_a_killed_run_do_not_count(tmp_path):
    events = [{"kind": "clip", "step": step} for step in range(1, 46)]
    run = write_run(tmp_path / "killed", metrics=[validated(20, 2.0), line(40)], events=events)
    (row,) = compare([run]).rows
    assert row.clip_share == 1.0
