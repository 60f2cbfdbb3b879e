import struct
import subprocess
import sys

import pytest

from lmapp.cells import CELLS
from lmapp.errors import LmappError
from lmapp.experiments.draw import NamedCurve, draw_decay


def curve(label="GRU", cell="gru", rate=0.9, lags=40, half_life=6.6, censored=False, zeros=0.0):
    R = [rate**k for k in range(lags + 1)]
    return NamedCurve(label, cell, list(range(lags + 1)), R, [zeros] * (lags + 1), half_life, censored)


def drawn(curves, path, title="Decay"):
    """The figure that was saved."""
    figures = []

    def keep(figure, target):
        figures.append(figure)
        save(figure, target)

    import lmapp.experiments.draw as module

    save = module._save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_save", keep)
        draw_decay(curves, path, title=title)
    (axes,) = figures[0].axes
    return axes


def test_picture_is_a_png_as_wide_as_promised_and_alone(tmp_path):
    path = tmp_path / "new" / "decay.png"
    draw_decay([curve(), curve("LSTM", "lstm", 0.95)], path, title="Decay")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1600, 920)
    assert [file.name for file in path.parent.iterdir()] == ["decay.png"]


def test_what_is_drawn(tmp_path):
    axes = drawn(
        [curve(), curve("LSTM", "lstm", 0.999, half_life=40.0, censored=True, zeros=0.25)],
        tmp_path / "a.png",
        "Two cells",
    )
    assert axes.get_yscale() == "log"
    assert axes.get_title(loc="left") == "Two cells"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["GRU: half-life 6.6 steps", "LSTM: half-life > 40 steps, up to 25 % zeros"]
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
    together = looks([curve(cell, cell) for cell in cells])
    # Beside others that have no look of their own, which are told apart in the order of their names.
    assert [looks([curve("a", "a+b"), curve(cell, cell)])[1] for cell in CELLS] == together[:-1]
    assert len({look[1:] for look in together}) == len({look[2] for look in together}) == len(cells)
    families = ["vanilla", "lstm", "gru", "mingru", "concatenated", "lstm+gru"]
    assert len({look[0] for cell, look in zip(cells, together, strict=True) if cell in families}) == len(families)
    twice = drawn([curve("one", "gru"), curve("two", "gru")], tmp_path / "a.png")
    lines = [item for item in twice.lines if not item.get_label().startswith("_")]
    assert lines[0].get_markerfacecolor() != lines[1].get_markerfacecolor()


def test_lags_before_the_reference_are_no_zeros_to_speak_of(tmp_path):
    late = NamedCurve("late", "concatenated", [0, 1, 2, 3], [0.0, 1.0, 0.5, 0.2], [1.0, 0.0, 0.0, 0.0], 2.0, False)
    cut = NamedCurve("cut", "vanilla", [0, 1, 2, 3], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0], 0.5, False)
    labels = [text.get_text() for text in drawn([late, cut], tmp_path / "a.png").get_legend().get_texts()]
    assert labels == ["late: half-life 2 steps", "cut: half-life 0.5 steps, up to 100 % zeros"]


def test_exact_zeros_growth_and_no_curves_are_drawn_without_complaint(tmp_path):
    zero = NamedCurve("cut", "vanilla", [0, 1, 2], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0], 1.0, False)
    none = NamedCurve("none", "vanilla", [0, 1, 2], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 0.0, False)
    axes = drawn([zero, none, curve(rate=1.3)], tmp_path / "a.png")
    assert axes.get_ylim()[1] > 1.3**40
    drawn([], tmp_path / "b.png")


def test_a_failed_picture_leaves_the_old_one_and_no_other_file(tmp_path):
    path = tmp_path / "decay.png"
    path.mkdir()
    with pytest.raises(LmappError, match=r"decay\.png could not be written"):
        draw_decay([curve()], path, title="Decay")
    assert [file.name for file in tmp_path.iterdir()] == ["decay.png"]


def test_reading_runs_needs_neither_torch_nor_matplotlib():
    code = (
        "import sys, lmapp.experiments.history, lmapp.experiments.compare, lmapp.experiments.draw;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
