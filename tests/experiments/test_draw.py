import struct
import subprocess
import sys

import numpy as np
import pytest

from lmapp.cells import CELLS
from lmapp.errors import LmappError
from lmapp.experiments.draw import QUANTILES, Sheet, draw_gradients


def sheet(label="GRU", cell="gru", rate=0.9, lags=40, half_life=6.6, censored=False, zeros=0.0, **measured):
    R = [rate**k for k in range(lags + 1)]
    return Sheet(
        label=label,
        cell=cell,
        lags=list(range(lags + 1)),
        R=R,
        zero_share=[zeros] * (lags + 1),
        half_life=half_life,
        censored=censored,
        **measured,
    )


def few(label, cell, R, zero_share, half_life):
    return Sheet(
        label=label,
        cell=cell,
        lags=list(range(len(R))),
        R=R,
        zero_share=zero_share,
        half_life=half_life,
        censored=False,
    )


def panels(sheets, path, title="Gradients"):
    """The four axes that were saved."""
    figures = []

    def keep(figure, target):
        figures.append(figure)
        save(figure, target)

    import lmapp.experiments.draw as module

    save = module.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save", keep)
        draw_gradients(sheets, path, title=title)
    assert figures[0].get_suptitle() == title.replace("$", "\\$")
    return figures[0].axes


def drawn(sheets, path):
    """The panel of the decay."""
    return panels(sheets, path)[0]


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_picture_is_a_png_as_wide_as_promised_and_alone(tmp_path):
    path = tmp_path / "new" / "decay.png"
    draw_gradients([sheet(), sheet("LSTM", "lstm", 0.95)], path, title="Gradients")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (2100, 1380)
    assert [file.name for file in path.parent.iterdir()] == ["decay.png"]


def test_what_is_drawn(tmp_path):
    axes = drawn(
        [sheet(), sheet("LSTM", "lstm", 0.999, half_life=40.0, censored=True, zeros=0.25)],
        tmp_path / "a.png",
    )
    assert axes.get_yscale() == "log"
    assert labels(axes) == ["GRU: half-life 6.6 steps", "LSTM: half-life > 40 steps, up to 25 % of gradients exactly 0"]
    texts = " ".join(text.get_text() for text in axes.texts)
    assert "1/2" in texts
    assert "1/100" in texts
    marks = [item for item in axes.lines if list(item.get_ydata()) == [0.5] and len(item.get_xdata()) == 1]
    assert [mark.get_xdata()[0] for mark in marks] == [6.6]  # a half-life beyond the window has no mark


def test_a_cell_looks_the_same_in_every_picture_and_cells_differ_without_colour(tmp_path):
    def looks(curves):
        axes = drawn(curves, tmp_path / "a.png")
        lines = [item for item in axes.lines if not item.get_label().startswith("_")]
        return [(item.get_color(), item.get_linestyle(), item.get_marker()) for item in lines]

    cells = [*CELLS, "lstm+gru"]
    together = looks([sheet(cell, cell) for cell in cells])
    # Beside others that have no look of their own, which are told apart in the order of their names.
    assert [looks([sheet("a", "a+b"), sheet(cell, cell)])[1] for cell in CELLS] == together[:-1]
    assert len({look[1:] for look in together}) == len({look[2] for look in together}) == len(cells)
    families = ["vanilla", "lstm", "gru", "mingru", "concatenated", "lstm+gru"]
    assert len({look[0] for cell, look in zip(cells, together, strict=True) if cell in families}) == len(families)
    twice = drawn([sheet("one", "gru"), sheet("two", "gru")], tmp_path / "a.png")
    lines = [item for item in twice.lines if not item.get_label().startswith("_")]
    assert lines[0].get_markerfacecolor() != lines[1].get_markerfacecolor()


def test_lags_before_the_reference_are_no_zeros_to_speak_of(tmp_path):
    late = few("late", "concatenated", [0.0, 1.0, 0.5, 0.2], [1.0, 0.0, 0.0, 0.0], 2.0)
    cut = few("cut", "vanilla", [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0], 0.5)
    assert labels(drawn([late, cut], tmp_path / "a.png")) == [
        "late: half-life 2 steps",
        "cut: half-life 0.5 steps, up to 100 % of gradients exactly 0",
    ]


def test_exact_zeros_growth_and_no_curves_are_drawn_without_complaint(tmp_path):
    zero = few("cut", "vanilla", [1.0, 0.0, 0.0], [0.0, 1.0, 1.0], 1.0)
    none = few("none", "vanilla", [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 0.0)
    axes = drawn([zero, none, sheet(rate=1.3)], tmp_path / "a.png")
    assert axes.get_ylim()[1] > 1.3**40
    drawn([], tmp_path / "b.png")


def test_the_other_panels_show_what_was_measured_and_say_what_was_not(tmp_path):
    whole = sheet(
        "first",
        bounds=([0.95**k for k in range(41)], [1.2**k for k in range(41)]),
        eigenvalues=np.array([0.5 + 0.5j, 0.5 - 0.5j, 0.2]),
        radius=0.7071,
        weight_share=[0.2, 0.45, 0.7, 0.9, 1.0],
        half_weights="2",
        norms=list(0.1 + QUANTILES),
        threshold=0.5,
    )
    decay, spectrum, weights, norms = panels([whole, sheet("wide", "lstm", radius=1.25)], tmp_path / "a.png")
    assert "bounds" in decay.get_title(loc="left")
    last = [line.get_ydata()[-1] for line in decay.lines if len(line.get_ydata()) == 41]
    assert last == pytest.approx([0.9**40, 0.95**40, 1.2**40, 0.9**40])
    assert sorted(map(tuple, spectrum.collections[0].get_offsets().tolist())) == [(0.2, 0), (0.5, -0.5), (0.5, 0.5)]
    assert labels(spectrum) == ["first: mean radius 0.707", "wide: mean radius 1.25"]
    circle = spectrum.lines[-1]
    assert np.hypot(*circle.get_data()) == pytest.approx(1.25)
    assert labels(weights) == ["first: half from lags up to 2"]
    assert labels(norms) == ["first: clipped above 0.5"]
    assert norms.lines[0].get_data()[1].tolist() == QUANTILES.tolist()

    bare = panels([sheet()], tmp_path / "a.png")
    assert [[text.get_text() for text in axes.texts if "not" in text.get_text()] for axes in bare[1::2]] == [
        ["not measured"],
        ["not recorded"],
    ]


def test_a_failed_picture_leaves_the_old_one_and_no_other_file(tmp_path):
    path = tmp_path / "decay.png"
    path.mkdir()
    with pytest.raises(LmappError, match=r"decay\.png could not be written"):
        draw_gradients([sheet()], path, title="Gradients")
    assert [file.name for file in tmp_path.iterdir()] == ["decay.png"]


def test_reading_runs_needs_neither_torch_nor_matplotlib():
    code = (
        "import sys, lmapp.experiments.history, lmapp.experiments.compare, lmapp.experiments.draw;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_shown_as_they_are(tmp_path):
    """A dollar begins no formula, and an underscore at the beginning hides no name."""
    sheets = [sheet("_a"), sheet("$x$", "lstm"), sheet("$\\frac$", "vanilla")]
    first, *_ = panels(sheets, tmp_path / "a.png", title="of $5")
    assert [label.partition(":")[0] for label in labels(first)] == [" _a", "\\$x\\$", "\\$\\frac\\$"]


def test_many_checkpoints_of_one_cell_are_told_apart(tmp_path):
    axes = drawn([sheet(str(number), "gru") for number in range(6)], tmp_path / "a.png")
    lines = [line for line in axes.lines if len(line.get_xdata()) == 41]
    assert len({(line.get_marker(), line.get_markerfacecolor()) for line in lines}) == 6
    assert len({line.get_color() for line in lines}) == 1
