"""The bidirectional model: restores masked characters from the text on both sides of them.

Shapes: B batch, T time, H hidden, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmapp.cells.products import linear
from lmapp.cells.protocol import Cell
from lmapp.errors import UsageError
from lmapp.models import inputs
from lmapp.models.recurrent import find_cells, make_layers, reset_layers


def choose_masked(
    tokens: Tensor, starts_character: Tensor, fraction: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw the characters to restore: (B, T) bool, true for all symbols of each of them.

    Args:
        tokens: (B, T) int64 ids, each row a piece of text. What continues a character from before it is not drawn.
        starts_character: (V,) bool, false for symbols that continue a character.
        fraction: share of the characters; at least one is drawn, if there is one.
        generator: on the tokens' device; torch's global one unless given.
    """
    starts = starts_character[tokens]
    characters = starts.flatten().nonzero()[:, 0]
    count = max(1, round(fraction * len(characters)))
    order = torch.randperm(len(characters), generator=generator, device=tokens.device)
    chosen = torch.zeros_like(starts)
    chosen.view(-1)[characters[order[:count]]] = True
    times = torch.arange(tokens.shape[1], device=tokens.device)
    # Where the character of each symbol begins; of one from before the row that is 0, where nothing is drawn then.
    begins = torch.where(starts, times, 0).cummax(1).values
    return chosen.gather(1, begins)


class InfillModel(nn.Module):
    """Characters, some of them masked, to logits of what stands at each place, through L bidirectional layers.

    A layer is two cells: one reads the text from its beginning, one from its end, both from zero states; the layer
    above and the readout read the outputs of both. Its alphabet has one symbol more than it can write: `mask_symbol`.
    It has read the character that it predicts unless that is masked, so it is no language model.

    `compute_dtype` as in a `RecurrentModel`.

    Args:
        vocabulary_size: V, without the mask symbol.
        cell: the cell of every layer, or one name a layer.
        hidden_size: H, of each direction.
        num_layers: L, if one cell is named; by default 1.
        embedding_size: 0 for one-hot inputs.
        activation: of the vanilla cells.
        bias: whether cells and readout have biases.
        dropout: of each layer's output, one mask for the window.
        init: as a `RecurrentModel` has it, `forget_bias` and `chrono` likewise.
        forget_bias: initial bias of the gates that keep the state.
        chrono: T_max.

    Raises:
        UsageError: the options do not go together.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        cell: str | Sequence[str],
        hidden_size: int,
        num_layers: int | None = None,
        embedding_size: int = 0,
        activation: str = "tanh",
        bias: bool = True,
        dropout: float = 0.0,
        init: str = "orthogonal",
        forget_bias: float | None = None,
        chrono: float | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.dropout = dropout
        self.compute_dtype = torch.float32
        kinds = find_cells(cell, num_layers)
        if kinds[-1].reads_out:
            raise UsageError(
                f"--model.cell: the outputs of {kinds[-1].__name__} are the logits, and an infill model has two cells\n"
                "a layer, whose outputs it reads together."
            )
        self.embedding = nn.Embedding(vocabulary_size + 1, embedding_size) if embedding_size else None
        width, fan_in = (embedding_size, None) if embedding_size else (vocabulary_size + 1, 1.0)
        given = {"activation": activation, "bias": bias}
        self.forwards, self.backwards = (
            nn.ModuleList(make_layers(kinds, width, hidden_size, vocabulary_size, options=given, both_ways=True))
            for _ in range(2)
        )
        for layers in (self.forwards, self.backwards):
            reset_layers(list(layers), init, fan_in, forget_bias, chrono)  # type: ignore[arg-type]
        self.head = nn.Linear(2 * self._layers()[-1][0].output_size, vocabulary_size, bias=bias)

    @property
    def mask_symbol(self) -> int:
        """The id that stands in the place of a character to be restored."""
        return self.vocabulary_size

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids (B, T), `mask_symbol` among them, to logits (B, T, V), in fp32 or float64."""
        times = tokens.t()
        y: Tensor | None = None  # the first layer reads the characters
        for ahead, back in self._layers():
            from_end = None if y is None else y.flip(0)
            y = torch.cat((self._run(ahead, times, y), self._run(back, times.flip(0), from_end).flip(0)), -1)
            if self.training and self.dropout:
                y = y * F.dropout(y.new_ones(y.shape[1:]), self.dropout)
        assert y is not None
        return linear(y, self.head.weight, self.head.bias).transpose(0, 1).to(self.head.weight.dtype)

    def kernels(self, batch_size: int, sequence_length: int) -> list[str]:
        """The kernel that each layer runs on (B, T) tokens, in both directions: "scan", "table+scan" or "torch"."""
        layers = [ahead for ahead, _ in self._layers()]
        names = [layer.kernel(self.head.weight.device.type, self._dtype(), False) for layer in layers]
        if self._by_table(layers[0], batch_size * sequence_length):
            names[0] = "table+scan"
        return names

    def _layers(self) -> list[tuple[Cell, Cell]]:
        """From the bottom up: the cell that reads from the beginning and the one that reads from the end."""
        return list(zip(self.forwards, self.backwards, strict=True))  # type: ignore[arg-type]

    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.head.weight.dtype == torch.float64 else self.compute_dtype

    def _by_table(self, layer: Cell, count: int) -> bool:
        """Whether `layer`, a lowest one, gathers its gates for `count` symbols from a table."""
        kernel = layer.kernel(self.head.weight.device.type, self._dtype(), False)
        return inputs.by_table(self.embedding, self.vocabulary_size + 1, count, kernel)

    def _run(self, layer: Cell, times: Tensor, x: Tensor | None) -> Tensor:
        """The outputs (T, B, H) of a layer on x (T, B, …), or on the symbols (T, B) themselves."""
        state = layer.initial_state(times.shape[1])
        if x is not None:
            return layer(x, state)[0]
        dtype = self._dtype()
        if self._by_table(layer, times.numel()):
            return layer.scan(inputs.gather(inputs.table(layer, self.embedding), times, dtype), state)[0]
        return layer(inputs.embed(times, self.embedding, self.vocabulary_size + 1, dtype), state)[0]
