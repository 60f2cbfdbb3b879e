"""Every validation and test figure comes from here.

Shapes: B batch, T time, V vocabulary, N ids of the text, R rows it is read in, M starts of records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lmapp.errors import LmappError
from lmapp.models.infill import InfillModel, choose_masked
from lmapp.resets import inner_starts, keep_mask
from lmapp.units import perplexity

BLOCK = 2**16
"""Ids of a text among which a share of the characters is masked at a time."""


@dataclass(frozen=True)
class Score:
    """Sums over predicted characters; scores of parts of a text add up to that of the whole.

    Attributes:
        loss_sum: nats.
        characters: characters predicted (a character of several symbols counts once).
        bytes: UTF-8 bytes they stand for.
    """

    loss_sum: float
    characters: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per character."""
        return self.loss_sum / self.characters if self.characters else math.nan

    @property
    def perplexity(self) -> float:
        """e^loss, infinite where that overflows."""
        return perplexity(self.loss)

    @property
    def bits_per_char(self) -> float:
        """Bits per character."""
        return self.loss / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte."""
        return self.loss_sum / math.log(2) / self.bytes if self.bytes else math.nan


def evaluate(
    model: Any,
    ids: Tensor | np.ndarray,
    starts_character: np.ndarray,
    symbol_bytes: np.ndarray,
    *,
    batch_size: int,
    warm_up: int = 512,
    chunk: int = 256,
    starts: np.ndarray | None = None,
    share: tuple[int, int] = (0, 1),
) -> Score:
    """Read a text with carried state and score each of its characters but the first, once.

    The N ids are read in R = max(1, min(batch_size, ⌊N/warm_up⌋)) rows, whose lengths differ by one at most. Each row
    first reads the `warm_up` ids before it, unscored; row 0 starts cold. So the loss hardly depends on batch_size, and
    not at all where records of at most `warm_up` ids begin from the initial state.

    Args:
        model: a `RecurrentModel`, a `WindowModel`, or whatever has their `initial_state`, `forward`, `train` and
            `training`.
        ids: (N,) integers.
        starts_character: (V,) bool, false for symbols that continue a character.
        symbol_bytes: (V,) UTF-8 bytes of each symbol.
        batch_size: the most rows read at once.
        warm_up: ids a row reads before it is scored.
        chunk: characters read in one call of the model.
        starts: (M,) int64, in order, the ids that are read from the initial state again, as they begin a record.
        share: (r, P): only rows r, r + P, r + 2P, … are read, whose scores for all r < P add up to the text's.

    Raises:
        LmappError: fewer than two ids: nothing is predicted.
    """
    ids = _checked(ids)
    count = len(ids)
    starts = inner_starts(starts, count)
    rows = max(1, min(batch_size, count // warm_up if warm_up else count - 1))
    # Targets are 1..N−1. The first rows are the longer ones, so that the ids before row 1 suffice for its warm-up.
    shares = np.full(rows, (count - 1) // rows)
    shares[: (count - 1) % rows] += 1
    firsts = np.concatenate(([0], np.cumsum(shares)[:-1]))  # each row's first input
    shares, firsts = shares[share[0] :: share[1]], firsts[share[0] :: share[1]]
    tally = _Tally(model.initial_state(1)[0][0].device, starts_character, symbol_bytes)
    if len(shares) == 0:
        return tally.score()
    with evaluating(model):
        states = model.initial_state(len(shares))
        begun = firsts[firsts > 0]
        if len(begun) and warm_up:
            warm = model.initial_state(len(begun))
            for start in range(0, warm_up, chunk):
                offsets = np.arange(start, min(start + chunk, warm_up)) - warm_up
                _, warm = _read(model, tally.tensor(ids[begun[:, None] + offsets]), warm, starts, begun + offsets[0])
            states = tuple(
                type(cold)(*(torch.cat((c[: -len(begun)], w)) for c, w in zip(cold, state, strict=True)))
                for cold, state in zip(states, warm, strict=True)
            )
        for start in range(0, int(shares[0]), chunk):
            offsets = np.arange(start, min(start + chunk, int(shares[0])))
            scored = offsets < shares[:, None]
            # A shorter row reads one id more than it has; that target is not scored.
            inputs = np.minimum(firsts[:, None] + offsets, count - 2)
            logits, states = _read(model, tally.tensor(ids[inputs]), states, starts, firsts + start)
            tally.add(logits, ids[inputs + 1], scored)
    return tally.score()


def evaluate_cold(
    model: Any,
    ids: Tensor | np.ndarray,
    starts_character: np.ndarray,
    symbol_bytes: np.ndarray,
    *,
    window: int = 256,
    batch_size: int = 64,
    starts: np.ndarray | None = None,
) -> Score:
    """Score separate windows of `window` inputs and targets, each from the initial state; a shorter last one counts.

    Arguments and errors as in `evaluate`.
    """
    ids = _checked(ids)
    count = len(ids) - 1
    starts = inner_starts(starts, len(ids))
    tally = _Tally(model.initial_state(1)[0][0].device, starts_character, symbol_bytes)
    with evaluating(model):
        for inputs in _windows(count, window, batch_size):
            cold = model.initial_state(len(inputs))
            logits, _ = _read(model, tally.tensor(ids[inputs]), cold, starts, inputs[:, 0])
            tally.add(logits, ids[inputs + 1], np.ones(inputs.shape, dtype=bool))
    return tally.score()


def evaluate_infill(
    model: InfillModel,
    ids: Tensor | np.ndarray,
    starts_character: np.ndarray,
    symbol_bytes: np.ndarray,
    *,
    mask_fraction: float,
    window: int,
    batch_size: int = 64,
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
) -> Score:
    """Restore masked characters of a text and score each of them, once.

    The mask is drawn in one piece of the text after the other, so it depends on nothing but text, share and seed. The
    text is read in separate windows of `window` ids, a shorter last one among them, as in training. The score's
    characters and bytes are those masked: its loss is no language model's, and e to it no perplexity to compare with
    one.

    Args:
        model: an `InfillModel`.
        ids: (N,) integers.
        starts_character: (V,) bool, false for symbols that continue a character.
        symbol_bytes: (V,) UTF-8 bytes of each symbol.
        mask_fraction: share of the characters to restore.
        window: ids read at a time.
        batch_size: windows read at once; they do not depend on each other.
        seed: of the mask.
        share: (r, P): only every P-th batch of windows is read, from the r-th on; the scores for all r < P add up.

    Raises:
        LmappError: there is no text.
    """
    ids = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if len(ids) == 0:
        raise LmappError("Nothing to restore: the text is empty.")
    masks = _masks(ids, np.asarray(starts_character), mask_fraction, seed)
    drawn = np.empty(0, dtype=bool)  # the mask from the next window on, as far as it is drawn
    tally = _Tally(model.head.weight.device, starts_character, symbol_bytes)
    with evaluating(model):
        for index, places in enumerate(_windows(len(ids), window, batch_size)):
            while len(drawn) < places.size:
                drawn = np.concatenate((drawn, next(masks)))
            masked, drawn = drawn[: places.size].reshape(places.shape), drawn[places.size :]
            if index % share[1] != share[0]:
                continue
            inputs = np.where(masked, model.mask_symbol, ids[places].astype(np.int64))
            tally.add(model(tally.tensor(inputs)), ids[places], masked)
    return tally.score()


def _read(model: Any, tokens: Tensor, states: Any, starts: np.ndarray | None, firsts: np.ndarray) -> tuple[Tensor, Any]:
    """Tokens (B, T), rows that begin at `firsts` of the text, reset where a record starts; as the model's `forward`."""
    if starts is None:
        return model(tokens, states)
    return model(tokens, states, keep_mask(starts, firsts, tokens.shape[1]).to(tokens.device))


def _masks(ids: np.ndarray, starts_character: np.ndarray, fraction: float, seed: int) -> Iterator[np.ndarray]:
    """Which symbols of a text are masked, (n,) bool for one piece after the other of BLOCK ids.

    A piece is so much longer that the next one begins with a character.
    """
    generator, starts = torch.Generator().manual_seed(seed), torch.from_numpy(starts_character)
    start = 0
    while start < len(ids):
        end = min(start + BLOCK, len(ids))
        while end < len(ids) and not starts_character[ids[end]]:
            end += 1
        tokens = torch.from_numpy(ids[start:end].astype(np.int64))[None]
        yield choose_masked(tokens, starts, fraction, generator)[0].numpy()
        start = end


def _windows(count: int, window: int, batch_size: int) -> Iterator[np.ndarray]:
    """The places 0..count−1 as windows, batch_size of them at a time, (B, window); then what is left, (1, rest)."""
    whole = count // window * window
    for start in range(0, whole, batch_size * window):
        yield np.arange(start, min(start + batch_size * window, whole)).reshape(-1, window)
    if whole < count:
        yield np.arange(whole, count)[None]


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(o)[y] of each prediction, in nats: (B, T) from logits (B, T, V) and targets (B, T).

    Where the target is −1, nothing is predicted and the loss is 0. Models hand out logits that lie time-major in
    memory; they are read so, for flattening them as they are indexed would copy them.
    """
    rows = F.cross_entropy(
        logits.transpose(0, 1).flatten(0, 1), targets.t().flatten(), ignore_index=-1, reduction="none"
    )
    return rows.view(targets.shape[1], targets.shape[0]).t()


class _Tally:
    """Sums of losses, characters and bytes over scored targets."""

    def __init__(self, device: torch.device, starts_character: np.ndarray, symbol_bytes: np.ndarray) -> None:
        self.device = device
        self.starts_character = np.asarray(starts_character)
        self.symbol_bytes = np.asarray(symbol_bytes)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.characters = 0
        self.bytes = 0

    def tensor(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def add(self, logits: Tensor, targets: np.ndarray, scored: np.ndarray) -> None:
        """Logits (B, T, V), targets (B, T), scored (B, T) bool."""
        # widened first: −1 does not fit the unsigned type of a memory map
        wanted = self.tensor(np.where(scored, targets.astype(np.int64), -1))
        self.loss_sum += losses(logits, wanted).double().sum()
        self.characters += int(self.starts_character[targets[scored]].sum())
        self.bytes += int(self.symbol_bytes[targets[scored]].sum())

    def score(self) -> Score:
        return Score(float(self.loss_sum), self.characters, self.bytes)


def _checked(ids: Tensor | np.ndarray) -> np.ndarray:
    ids = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if len(ids) < 2:
        raise LmappError(f"Nothing to score: the text has {len(ids)} characters, and the first is only read.")
    return ids


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """No graph and no dropout; the model's mode is restored whatever happens."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
