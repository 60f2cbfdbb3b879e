"""Whole training steps (forward, loss, backward, clip, fused AdamW) beside torch.nn.

A rate is that of the median step. The peer is torch.nn's own module on one-hot input, in fp32 and under bf16 autocast;
cells that torch.nn does not have stand alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from measuring import Column, Peak, Result, Settings, interleave, result
from sides import CUDA_CASES, OURS_BF16, OURS_FP32, PEER_BF16, PEER_FP32, Case, Training

TITLE = "training steps, characters a second"
COLUMNS: list[Column] = [
    ("lmapp bf16", "figure", ",.0f"),
    ("fp32", "figure_fp32", ",.0f"),
    ("torch fp32", "peer_fp32", ",.0f"),
    ("bf16", "peer_bf16", ",.0f"),
    ("ratio", "ratio", ".2f"),
    ("to bf16", "ratio_to_bf16", ".2f"),
    ("fp32", "ratio_fp32", ".2f"),
    ("GFLOP/s", "gflop_per_second", ".0f"),
    ("of peak", "peak_share", ".0%"),
    ("fp32", "peak_share_fp32", ".0%"),
]
CASES = [
    Case("gru", 1, 512, 32, 64),
    Case("gru", 2, 512, 64, 128),
    Case("gru", 2, 256, 64, 64),
    Case("lstm", 1, 512, 32, 64),
    Case("lstm", 2, 512, 64, 128),
    Case("lstm", 2, 256, 64, 64),
    Case("vanilla", 1, 512, 64, 128),
    Case("vanilla", 1, 128, 50, 50),
    Case("gru", 1, 128, 50, 50),
    Case("lstm", 1, 128, 50, 50),
    Case("gru_before", 1, 512, 32, 64),
    Case("mingru", 1, 512, 32, 64),
    Case("minlstm", 1, 512, 32, 64),
]


def results(settings: Settings, cases: Sequence[Case] | None = None) -> Iterator[Result]:
    """One result a case."""
    for case in cases or (CUDA_CASES if settings.device == "cuda" else CASES):
        name = f"step {case.name}"
        if settings.wants(name):
            yield _measure(settings, name, case)


def _measure(settings: Settings, name: str, case: Case) -> Result:
    training = {side: Training(side, case, settings.device) for side in case.sides}
    peak = Peak(settings)
    sides = {side: trained.step for side, trained in training.items()}
    times = interleave({**sides, **peak.sides}, settings, peak.weights)
    rates = {side: case.characters / times[side].median for side in sides}
    ratios = times[PEER_FP32].medians / times[OURS_BF16].medians if PEER_FP32 in times else None
    flop = training[OURS_BF16].flop_per_character() / 1e9
    peak_bf16, peak_fp32 = (peak.gflop_per_second(times, precision) for precision in ("bf16", "fp32"))
    return result(
        settings,
        name,
        rates[OURS_BF16],
        "characters/s",
        figure_fp32=rates[OURS_FP32],
        peer_fp32=rates.get(PEER_FP32),
        peer_bf16=rates.get(PEER_BF16),
        ratio_rounds=None if ratios is None else [float(ratios.min()), float(ratios.max())],
        gflop_per_second=flop * rates[OURS_BF16],
        gflop_per_second_fp32=flop * rates[OURS_FP32],
        peak_gflop_per_second=peak_bf16,
        peak_gflop_per_second_fp32=peak_fp32,
        peak_share=flop * rates[OURS_BF16] / peak_bf16,
        peak_share_fp32=flop * rates[OURS_FP32] / peak_fp32,
        spread={side: times[side].spread for side in sides},
    )
