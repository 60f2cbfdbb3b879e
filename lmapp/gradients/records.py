"""Probe windows of a task: whole records, which end with their answers, read from the initial state they begin with.

Shapes as in `lmapp.gradients.decay`; P ids of a record, M records.
"""

import numpy as np

from lmapp.gradients.decay import USUAL_MAX_LAG, ProbeShape


def record_shape(
    record: int,
    records: int,
    end_points: int,
    *,
    truncation_length: int,
    windows: int = 8,
    max_lag: int | None = None,
    look_back: tuple[int, int] | None = None,
) -> tuple[ProbeShape, str]:
    """The shape of windows that are a record each: W + K + m + 1 = P, so that all end points predict its answer.

    Args:
        record: P.
        records: M.
        end_points: m, the last characters of the answer that are measured.
        truncation_length: τ.
        windows: N; no more than M.
        max_lag: K; by default all that a record has, but at most 512.
        look_back: as `ProbeShape` has it.

    Returns:
        The shape, and in words everything that is not as asked for ("" if all is).
    """
    most = record - 1 - end_points
    lag = min(most, USUAL_MAX_LAG if max_lag is None else max_lag)
    notes = []
    if max_lag is None and lag < most:
        notes.append(f"the largest lag is {lag} instead of {most:,}, unless a longer one is asked for")
    if max_lag is not None and lag < max_lag:
        notes.append(f"the largest lag is {lag} instead of {max_lag:,}, because a record has no more")
    if records < windows:
        notes.append(f"there are only {records} of {windows} windows, a record each")
    shape = ProbeShape(
        min(windows, records), most - lag, lag, end_points, truncation_length, "validation", look_back, record=True
    )
    return shape, f"gradient decay: {'; '.join(notes)}" if notes else ""


def record_windows(ids: np.ndarray, shape: ProbeShape, seed: int) -> np.ndarray:
    """Choose N different records, the same for the same ids, shape and seed, in text order.

    Args:
        ids: (M·P,) integers.
        shape: from `record_shape`.
        seed: of the choice.

    Returns:
        (N, P) int64.
    """
    records = np.asarray(ids).reshape(-1, shape.length)
    chosen = np.sort(np.random.default_rng(seed).choice(len(records), shape.windows, replace=False))
    return records[chosen].astype(np.int64)
