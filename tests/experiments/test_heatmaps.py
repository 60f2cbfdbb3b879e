import numpy as np
import pytest

from lmapp.errors import LmappError
from lmapp.experiments import heatmaps
from lmapp.experiments.heatmaps import decay_history, draw_influence, glyph, influence_levels


def test_the_history_of_decay_is_light_where_the_gradient_reaches():
    lags = list(range(33))
    picture = decay_history([0, 100, 200], lags, [[rate**k for k in lags] for rate in (0.5, 0.7, 0.99)])
    assert picture.dtype == np.uint8
    assert picture.shape == (690, 1200, 3)
    lightness = picture[:, :, 1].astype(float)[60:600]  # viridis' green rises all along
    early, late = lightness[:, 120:220].mean(), lightness[:, 820:920].mean()
    assert early < late - 50


def test_a_single_measurement_and_exact_zeros_have_a_picture():
    assert decay_history([7], [0, 1, 2], [[1.0, 0.0, 0.0]]).shape == (690, 1200, 3)


def test_influence_goes_by_the_logarithm_of_its_share_of_the_largest():
    assert influence_levels([0.0, 1e-9, 2e-3, 2e-2, 2.0]) == pytest.approx([0, 0, 0, 1 / 3, 1])
    assert influence_levels([0.0, 0.0]).tolist() == [0, 0]
    assert influence_levels([]).tolist() == []


def test_an_influence_picture_holds_every_character(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(heatmaps, "save", lambda figure, path: figures.append((figure, path)))
    text = list("Long live the king, and his 漢字\tall ") * 3
    draw_influence(text, np.linspace(0, 1, len(text)), "h", tmp_path / "a.png", "What it rests on")
    ((figure, path),) = figures
    assert path == tmp_path / "a.png"
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "What it rests on"
    assert [shown.get_text() for shown in axes.texts] == [glyph(character)[0] for character in [*text, "h"]]
    assert len(axes.patches) == len(text) + 1
    # The last is framed and white: what was predicted has no influence on itself.
    assert axes.patches[-1].get_facecolor() == (1, 1, 1, 1)
    greens = [patch.get_facecolor()[1] for patch in axes.patches[:-1]]
    assert greens == sorted(greens)


def test_a_character_without_a_glyph_is_its_code_point():
    assert glyph("a") == ("a", 8.5)
    assert glyph(" ")[0] == ""
    assert glyph("\n")[0] == "⏎"
    assert glyph("\U0001f9ff")[0] in ("1F9\nFF", "\U0001f9ff")


def test_an_influence_picture_is_written_whole_or_not_at_all(tmp_path):
    draw_influence(list("abc"), [0.1, 0.2, 1.0], "d", tmp_path / "new" / "a.png", "t")
    assert (tmp_path / "new" / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(LmappError, match="could not be written"):
        draw_influence(list("abc"), [0.1, 0.2, 1.0], "d", tmp_path / "new", "t")
