"""Passages that repeat, by samples of windows."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from lmapp.data import passages
from lmapp.data.passages import LENGTH, Passages, shared, window_hashes


def ids(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)


def passages_of(blocks: Sequence[NDArray[np.uint8]]) -> Passages:
    found = Passages()
    for block in blocks:
        hashes, at = found.sample(block)
        found.count(hashes, np.stack([at, at], axis=1))
    found.settle()
    return found


def test_windows_are_equal_where_their_hashes_are(real_text: str) -> None:
    text = real_text[:3000] + real_text[1000:2500] + "\0" * 200
    hashes = window_hashes(ids(text)).tolist()
    windows = [text[i : i + LENGTH] for i in range(len(text) - LENGTH + 1)]
    assert len(hashes) == len(windows)
    assert len(set(hashes)) == len(set(windows)) == len(set(zip(hashes, windows, strict=True)))
    assert len(window_hashes(ids(text[: LENGTH - 1]))) == 0


def test_a_sample_tells_the_share(real_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = real_text[:100_000] + real_text[40_000:60_000]
    windows = [text[i : i + LENGTH] for i in range(len(text) - LENGTH + 1)]
    exact = passages_of([ids(text)])
    assert exact.repeated == (len(windows) - len(set(windows))) / len(windows) > 1 / 6
    monkeypatch.setattr(passages, "_MOST", 4000)
    sampled = passages_of([ids(text)])
    assert 2000 < len(sampled.hashes) <= 4000
    assert sampled.repeated == pytest.approx(exact.repeated, abs=0.02)
    assert set(sampled.hashes.tolist()) <= set(exact.hashes.tolist())


def test_the_first_that_comes_again(real_text: str) -> None:
    letters = random.Random(1).choices("abcdefghij", k=5000)
    text = "".join(letters)
    assert passages_of([ids(text)]).first_repeated is None
    assert passages_of([ids(text + text[700:900])]).first_repeated == (700, 700)
    assert passages_of([]).repeated == 0


@pytest.mark.parametrize("block", [LENGTH, 100, 1000, 1 << 18])
def test_the_share_of_a_split_that_is_trained_on(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "_BLOCK", block)
    text = "".join(random.Random(2).choices("abcdefghij", k=4000))
    train, scored = ids(text[:3000]), ids(text[3000:] + text[500:1500])
    windows = len(scored) - LENGTH + 1
    assert shared(scored, train) == pytest.approx((1000 - LENGTH + 1) / windows)
    assert shared(ids(text[3000:]), train) == 0
    assert shared(train[:1000], train) == 1
    assert shared(scored, train[: LENGTH - 1]) == 0
    assert shared(scored[: LENGTH - 1], train) == 0
    assert shared(scored.astype(np.uint16), train.astype(np.uint32)) == shared(scored, train)
