"""Writing text: a model's next-character distribution, drawn from again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmapp.errors import LmappError, UsageError
from lmapp.models import LanguageNetwork
from lmapp.models.recurrent import States
from lmapp.vocabulary import UnknownCharacterError, Vocabulary, describe

ROWS = 256
"""Texts written side by side."""


@dataclass(frozen=True)
class Sampling:
    """How a character is drawn from logits.

    Attributes:
        temperature: the logits are divided by it; 0 is greedy.
        top_k: only the k likeliest symbols stay, and those as likely as the k-th (all, if the alphabet is smaller).
        top_p: of these, only the likeliest that together reach probability p stay (Holtzman et al. 2020,
            arXiv:1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature is a number at least 0 (0 is greedy), not {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k is a whole number at least 1, not {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is a number more than 0 and at most 1, not {self.top_p}.")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is drawn from: (…, V) from logits (…, V), at a temperature above 0."""
        # The largest becomes 0 first: divided by a tiny temperature the others go to −∞, and nothing overflows.
        scaled = (logits.double() - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            smallest = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
        probabilities = scaled.softmax(-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            # A symbol stays if those before it have not reached p yet: the likeliest one always does.
            dropped = ordered.cumsum(-1) - ordered >= self.top_p
            probabilities = probabilities.masked_fill(dropped.gather(-1, order.argsort(-1)), 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """One symbol for each row: (S,) from logits (S, V).

        Raises:
            LmappError: a logit is not finite.
        """
        if not math.isfinite(float(logits.amax())):
            raise LmappError("The network's output is not finite: it cannot write.")
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]


def encode_text(vocabulary: Vocabulary, text: str, what: str) -> list[int]:
    """A text as ids.

    Args:
        vocabulary: the model's alphabet.
        text: the text.
        what: what a message calls it.

    Raises:
        UsageError: it holds a character that the model does not know.
    """
    try:
        return [int(i) for i in vocabulary.encode(text)]
    except UnknownCharacterError as error:
        where = f"The {what}'s character {error.index + 1:,}, {describe(error.character)},"
        if "\ud800" <= error.character <= "\udfff":
            raise UsageError(f"{where} is a lone surrogate: the {what} was not valid UTF-8.") from None
        raise UsageError(
            f"{where} never occurred in the training text, so the model does not know it.\n"
            "Leave it out, or train with --data.byte-fallback true."
        ) from None


def read_prompt(
    model: LanguageNetwork, vocabulary: Vocabulary, ids: Sequence[int], samples: int
) -> tuple[Tensor, States]:
    """Logits (S, V) of the first new symbol and the states after the prompt, for S equal rows.

    Without a prompt the text starts as after a line break; where the alphabet has none, every character is as likely.
    """
    line_break = [] if vocabulary.characters and "\n" not in vocabulary.characters else vocabulary.encode("\n").tolist()
    states = model.initial_state(samples)
    device = next(model.parameters()).device
    if not ids:
        if not line_break:
            logits = torch.zeros(samples, len(vocabulary), device=device)
            logits[:, len(vocabulary.characters) :] = float("-inf")
            return logits, states
        ids = line_break
    logits, states = model(torch.tensor(ids, device=device).expand(samples, -1), states)
    return logits[:, -1], states


class _Writer:
    """One row's text as it grows: decoded, counted in characters, and ended at a stop string."""

    def __init__(self, vocabulary: Vocabulary, length: int, stop: Sequence[str]) -> None:
        self._decoder = vocabulary.decoder()
        self._left = length
        self._stop = [s for s in ([stop] if isinstance(stop, str) else stop) if s]
        self._held = ""  # might be the beginning of a stop string
        self.done = length <= 0

    def push(self, symbol: int) -> str:
        """The text that is certain once `symbol` is added."""
        # One symbol can complete two characters: a broken sequence of bytes, and what follows it.
        return "".join(self._add(character) for character in self._decoder.push(symbol))

    def _add(self, character: str) -> str:
        if self.done:
            return ""
        self._left -= 1
        self._held += character
        ended = max((s for s in self._stop if self._held.endswith(s)), key=len, default=None)
        if ended is not None:
            self.done = True
            return self._held[: len(self._held) - len(ended)]
        self.done = self._left <= 0
        keep = 0 if self.done else max((_overlap(self._held, s) for s in self._stop), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def generate(
    model: LanguageNetwork,
    vocabulary: Vocabulary,
    *,
    prompt: str = "",
    length: int = 500,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> Iterator[str]:
    """Write on from `prompt`, in pieces that are yielded as soon as they are certain.

    Args:
        model: in fp32; dropout is off while it writes.
        vocabulary: its alphabet.
        prompt: read first, not part of what is yielded.
        length: new characters, at most.
        sampling: how each is drawn; the default is temperature 1.
        stop: a string, or several, that end the text; the first that is complete is not part of it. Empty ones never
            occur.
        seed: the same seed gives the same text.

    Raises:
        UsageError: at once, for an unknown character in the prompt, a negative length or a seed that is none.
        LmappError: while writing, if the network's output is not finite.
    """
    steps = _generate(model, vocabulary, prompt, length, sampling or Sampling(), stop, seed, 1)
    return (piece for (piece,) in steps if piece)


def generate_samples(
    model: LanguageNetwork,
    vocabulary: Vocabulary,
    *,
    samples: int,
    prompt: str = "",
    length: int = 500,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """Several texts, `ROWS` at a time in one batch; arguments and errors as in `generate`."""
    texts: list[str] = []
    for first in range(0, samples, ROWS):
        rows = [""] * min(ROWS, samples - first)
        pieces_of_rows = _generate(
            model, vocabulary, prompt, length, sampling or Sampling(), stop, seed + first, len(rows)
        )
        for pieces in pieces_of_rows:
            rows = [text + piece for text, piece in zip(rows, pieces, strict=True)]
        texts += rows
    return texts


def _generate(
    model: LanguageNetwork,
    vocabulary: Vocabulary,
    prompt: str,
    length: int,
    sampling: Sampling,
    stop: Sequence[str],
    seed: int,
    samples: int,
) -> Iterator[list[str]]:
    """One piece (possibly empty) a row and step; what is asked for is checked before the first is wanted."""
    if length < 0:
        raise UsageError(f"--length is a whole number at least 0, not {length}.")
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"--seed is a whole number of at most 64 bits, not {seed}.")
    ids = encode_text(vocabulary, prompt, "prompt")
    writers = [_Writer(vocabulary, length, stop) for _ in range(samples)]
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    return _write(model, vocabulary, ids, writers, sampling, generator)


@torch.inference_mode()
def _write(
    model: LanguageNetwork,
    vocabulary: Vocabulary,
    ids: Sequence[int],
    writers: Sequence[_Writer],
    sampling: Sampling,
    generator: torch.Generator,
) -> Iterator[list[str]]:
    training = model.training
    model.eval()
    try:
        logits, states = read_prompt(model, vocabulary, ids, len(writers))
        while not all(writer.done for writer in writers):
            symbols = sampling.draw(logits, generator)
            yield [writer.push(symbol) for writer, symbol in zip(writers, symbols.tolist(), strict=True)]
            logits, states = model.step(symbols, states)
    finally:
        model.train(training)
