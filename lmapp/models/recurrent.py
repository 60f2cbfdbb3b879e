"""The stacked recurrent language model: embed, project, run, read out.

Shapes: B batch, T time, D input, H hidden, G gate_size, V vocabulary, L layers; R = B·m rows for m end points.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmapp import cells
from lmapp.cells import outside
from lmapp.cells.products import linear
from lmapp.cells.protocol import Cell, State, map_state
from lmapp.errors import UsageError
from lmapp.models import inputs

States = tuple[State, ...]


class LayerInput(NamedTuple):
    """What one layer reads over T steps, as in evaluation.

    Attributes:
        layer: its cell.
        x: (T, B, D), what comes from below.
        gates: (T, B, G), what `project` makes of that.
        state: entering the first step.
        zoneout: its mean, a State of (T, B, H); None without zoneout.
    """

    layer: Cell
    x: Tensor
    gates: Tensor
    state: State
    zoneout: State | None


class LayerGradients(NamedTuple):
    """One layer's gradients of J over R rows; see `RecurrentModel.state_gradients`."""

    entering: State
    outputs: Tensor
    readout: Tensor | None


class Gradients(NamedTuple):
    """Those of every layer, from the bottom up, and (T, R, D) those of the first layer's input."""

    layers: tuple[LayerGradients, ...]
    inputs: Tensor


def detach(states: States) -> States:
    """The same states, cut from the graph."""
    return tuple(map_state(Tensor.detach, state) for state in states)


def _pull(read: Tensor, parts: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
    """From the gradient (T, R, …) of what was read, by every step and row alike, to those of the parts it was made of.

    `read` and the parts have no T and R. None stands for a part that was not read.
    """
    rows = gradient.flatten(0, 1)
    found = torch.autograd.grad(read, parts, rows, retain_graph=True, allow_unused=True, is_grads_batched=True)
    return [None if pulled is None else pulled.unflatten(0, gradient.shape[:2]) for pulled in found]


def _zeros(like: Tensor) -> Tensor:
    """A leaf for one step and row of (T, B, …)."""
    return like.new_zeros(like.shape[-1], requires_grad=True)


def find_cells(cell: str | Sequence[str], num_layers: int | None) -> list[type[Cell]]:
    """The class of each layer's cell, from the bottom up: of one name L times, or of every name.

    Raises:
        UsageError: no such cell, or as many names as there are not layers.
    """
    names = [cell] if isinstance(cell, str) else list(cell)
    if len(names) > 1 and num_layers not in (None, len(names)):
        raise UsageError(f"{len(names)} cells are named for {num_layers} layers.")
    return [cells.find(name) for name in (names * (num_layers or 1) if len(names) == 1 else names)]


def _names(kinds: Sequence[type[Cell]]) -> str:
    return " and ".join(dict.fromkeys(kind.__name__ for kind in kinds))


def make_layers(
    kinds: Sequence[type[Cell]],
    width: int,
    hidden_size: int,
    vocabulary_size: int,
    *,
    options: Mapping[str, Any],
    dense: bool = False,
    both_ways: bool = False,
) -> list[Cell]:
    """One cell a layer, from the bottom up, each with those of the options that it takes.

    With `dense` a layer reads the outputs of all layers below it, with `both_ways` those of the layer below it and of
    that one's twin, which reads the text from its end.

    Raises:
        UsageError: a cell whose outputs are the logits is not the top one, or no cell takes the activation.
    """
    layers: list[Cell] = []
    for index, kind in enumerate(kinds):
        if kind.reads_out and index < len(kinds) - 1:
            raise UsageError(
                f"--model.cell: the outputs of {kind.__name__} are the logits, so it can only be the top layer."
            )
        taken = {name: value for name, value in options.items() if name in kind.options}
        if kind.reads_out:
            taken["output_size"] = vocabulary_size
        layers.append(outside.make(kind, width, hidden_size, **taken))
        width = (width if dense else 0) + layers[-1].output_size * (2 if both_ways else 1)
    if options["activation"] != "tanh" and not any("activation" in kind.options for kind in kinds):
        raise UsageError(f"--model.activation is an option of the vanilla cell; --model.cell is {_names(kinds)}.")
    if not options["bias"] and any("bias" not in kind.options for kind in kinds):
        raise UsageError(f"--model.bias false: {_names([k for k in kinds if 'bias' not in k.options])} has its biases.")
    return layers


def reset_layers(
    layers: Sequence[Cell], init: str, fan_in: float | None, forget_bias: float | None, chrono: float | None
) -> None:
    """Draw every layer's parameters anew.

    Args:
        layers: from the bottom up.
        init: as `RecurrentModel` has it.
        fan_in: the squared length of the lowest layer's inputs, if it is not their number.
        forget_bias: for the cells that have a gate which keeps the state, `chrono` likewise.
        chrono: T_max.

    Raises:
        UsageError: a bias is to be set and no cell has such a gate.
    """
    if init == "identity" and not any(layer.recurrent_weight for layer in layers):
        kinds = [type(layer) for layer in layers]
        raise UsageError(f"--model.init identity is that of recurrent matrices; {_names(kinds)} has none.")
    for index, layer in enumerate(layers):
        layer.reset_parameters(init, fan_in if index == 0 else None)
    if forget_bias is None and chrono is None:
        return
    for layer in [layer for layer in layers if layer.remembers] or layers:
        layer.set_memory_bias(forget_bias, chrono)


class RecurrentModel(nn.Module):
    """Characters to logits of the next character, through L recurrent layers.

    `compute_dtype` (float32 by default, bfloat16 for mixed precision) is that of the products and of what is kept for
    the backward pass; states, logits and parameters stay in fp32. A model moved to float64 computes in float64.

    Args:
        vocabulary_size: V.
        cell: the cell of every layer, or one name a layer.
        hidden_size: H.
        num_layers: L, if one cell is named; by default 1.
        embedding_size: 0 for one-hot inputs.
        activation: of the vanilla cells.
        bias: whether cells and readout have biases.
        connections: "plain"; "residual": a layer's input is added to its output where both have one width (He et al.
            2016); "dense": each layer reads the embedding and all lower outputs, the readout all outputs (Graves 2013).
        dropout: of each layer's output, one mask for the window (Gal & Ghahramani 2016, arXiv:1512.05287).
        weight_drop: of each recurrent matrix, one mask for the window (Merity et al. 2018, arXiv:1708.02182).
        zoneout: chance of a state's entry to keep its old value at a step; in evaluation the share of it that stays.
        tie_embeddings: the readout's matrix is the embedding's (Press & Wolf 2017, arXiv:1608.05859).
        init: "orthogonal", "identity" or "torch".
        forget_bias: initial bias of the gates that keep the state.
        chrono: T_max of chrono initialisation.

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
        connections: str = "plain",
        dropout: float = 0.0,
        weight_drop: float = 0.0,
        zoneout: float = 0.0,
        tie_embeddings: bool = False,
        init: str = "orthogonal",
        forget_bias: float | None = None,
        chrono: float | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.connections = connections
        self.dropout = dropout
        self.weight_drop = weight_drop
        self.zoneout = zoneout
        self.compute_dtype = torch.float32
        self.embedding = nn.Embedding(vocabulary_size, embedding_size) if embedding_size else None
        kinds = find_cells(cell, num_layers)
        self.layers = nn.ModuleList(
            make_layers(
                kinds,
                embedding_size or vocabulary_size,
                hidden_size,
                vocabulary_size,
                dense=connections == "dense",
                options={"activation": activation, "bias": bias},
            )
        )
        # What one-hot inputs, and those of a tied embedding, lack in length, the first layer's weights make up for.
        fan_in = 1.0 if self.embedding is None else (1 / 3 if tie_embeddings else None)
        reset_layers(self._cells(), init, fan_in, forget_bias, chrono)
        widths = [layer.output_size for layer in self._cells()]
        width = sum(widths) if connections == "dense" else widths[-1]
        self.head = None if kinds[-1].reads_out else nn.Linear(width, vocabulary_size, bias=bias)
        if tie_embeddings:
            self._tie(width)
        if weight_drop and not any(layer.recurrent_weight for layer in self._cells()):
            raise UsageError(f"--model.weight-drop acts on recurrent matrices; {_names(kinds)} has none.")
        self._refuse_what_does_nothing()

    def _refuse_what_does_nothing(self) -> None:
        layers, option = self._cells(), f"--model.connections {self.connections}"
        if self.connections == "dense" and len(layers) == 1:
            raise UsageError(f"{option} joins layers; there is one. Stack some: --model.num-layers 3")
        below = [0 if self.embedding is None else self.embedding.embedding_dim, *(x.output_size for x in layers)]
        adding = [x.output_size == width and not x.reads_out for x, width in zip(layers, below, strict=False)]
        if self.connections == "residual" and not any(adding):
            raise UsageError(
                f"{option} adds a layer's input to its output where both have one width; no layer here has that.\n"
                "Stack several (--model.num-layers), or set --model.embedding-size to --model.hidden-size."
            )
        if self.dropout and layers[0].reads_out:
            raise UsageError(
                f"--model.dropout acts on outputs that something reads; those of {type(layers[0]).__name__} are the "
                "logits."
            )

    def _tie(self, width: int) -> None:
        if self.head is None:
            raise UsageError(
                f"--model.tie-embeddings makes one matrix of embedding and readout; {type(self._cells()[-1]).__name__} "
                "has no readout."
            )
        if self.embedding is None or self.embedding.embedding_dim != width:
            raise UsageError(
                "--model.tie-embeddings makes one matrix of embedding and readout, so --model.embedding-size\n"
                f"has to be what the readout reads: {width} here."
            )
        self.embedding.weight = self.head.weight

    def initial_state(self, batch_size: int) -> States:
        """One zero state a layer."""
        return tuple(layer.initial_state(batch_size) for layer in self._cells())

    def forward(
        self, tokens: Tensor, states: States, keep: Tensor | None = None, credit: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Tokens (B, T) to logits (B, T, V), in fp32 or float64, and the states after the last token.

        Args:
            tokens: int64 ids.
            states: one State a layer, as from `initial_state` or an earlier call.
            keep: (B, T), multiplies the states entering step t (0: a new document starts there).
            credit: (B, T), multiplies only the gradient of those states.
        """
        dtype, times = self._dtype(), tokens.t()
        keep = None if keep is None else keep.t()
        credit = None if credit is None else credit.t()
        masked = keep is not None or credit is not None or self.zoneout > 0
        by_table = self._by_table(tokens.numel(), masked)
        stack = self._stack(times, dtype, needed=not by_table)
        after: list[State] = []
        for layer, state in zip(self._cells(), states, strict=True):
            zoneout = self._zoneout(layer, times.shape, state)
            with self._weight_drop(layer):
                if by_table and not after:
                    gates = inputs.gather(inputs.table(layer, self.embedding), times, dtype)
                    y, state = layer.scan(gates, state, keep, credit, zoneout)
                else:
                    y, state = layer(stack.read(), state, keep, credit, zoneout)
            if self.training and self.dropout and not layer.reads_out:
                # One mask for the whole window.
                y = y * F.dropout(y.new_ones(y.shape[1:]), self.dropout)
            stack.add(y)
            after.append(state)
        logits = self._read_out(stack)
        return logits.transpose(0, 1).to(self._wide()), tuple(after)

    def step(self, token: Tensor, states: States) -> tuple[Tensor, States]:
        """One token a row, (B,), to logits (B, V) and the states after it; fp32 (float64), as in evaluation."""
        stack = self._stack(token, self._wide())
        after = []
        for layer, state in zip(self._cells(), states, strict=True):
            y, new = layer.step(layer.project(stack.read()), state)
            if self.zoneout:
                y, new = layer.zone(y, state, new, map_state(lambda s: torch.full_like(s, self.zoneout), state))
            stack.add(y)
            after.append(new)
        return self._read_out(stack), tuple(after)

    def kernels(self, batch_size: int, sequence_length: int, masks: bool = False) -> list[str]:
        """The kernel that each layer runs on (B, T) tokens: "scan", "table+scan" or "torch".

        Args:
            batch_size: B.
            sequence_length: T.
            masks: whether keep or credit is given.
        """
        device, masked = self._device(), masks or self.zoneout > 0
        names = [layer.kernel(device, self._dtype(), masked) for layer in self._cells()]
        if self._by_table(batch_size * sequence_length, masked):
            names[0] = "table+scan"
        return names

    @torch.no_grad()
    def state_gradients(self, tokens: Tensor, states: States, targets: Tensor, end_points: Tensor) -> Gradients:
        """How single losses depend on the states and the inputs before them.

        Row b·m + e belongs to J = −log softmax(o at time end_points[e] of window b)[targets[b, e]].

        Args:
            tokens: (B, T).
            states: one State a layer, entering the first step.
            targets: (B, m).
            end_points: (m,), times in 0..T−1.

        Returns:
            `layers`, one LayerGradients a layer: `entering`, a State of (T+1, R, H) whose entry t is ∂J/∂(state
            entering step t) along that layer's recurrence and all above it (entry T zero); `outputs`
            (T, R, output_size), ∂J/∂(the layer's output at t), all ways up included; `readout`, the part of it that the
            readout takes from that layer directly (None: nothing). `inputs` (T, R, D): ∂J/∂(the embedding of the symbol
            read at t, or its one-hot vector), all ways included, those by residual or dense connections too. fp32
            (float64), as in evaluation, no parameter's gradient is touched.
        """
        rows = tokens.shape[0] * len(end_points)
        stack = self._stack(tokens.t(), self._wide())
        given = list(self._through(stack, states))
        logits = self._read_out(stack)[end_points].transpose(0, 1)  # (B, m, V)
        error = (logits.softmax(-1) - F.one_hot(targets, self.vocabulary_size)).to(logits.dtype)
        error = error if self.head is None else error @ self.head.weight
        upstream = error.new_zeros(tokens.shape[1], *error.shape)
        upstream[end_points, :, torch.arange(len(end_points), device=error.device)] = error.transpose(0, 1)
        upstream = upstream.reshape(tokens.shape[1], rows, -1)
        # How the layers are connected is linear and acts on each step and row by itself, so a stack of zeros for one of
        # them will do to differentiate it.
        with torch.enable_grad():
            parts, twins = [_zeros(given[0].x)], []  # the first layer's input and every layer's output
            twin = _Stack(self.connections, parts[0], self.embedding is None)
            for output in stack.outputs:
                twins.append(twin.read())
                parts.append(_zeros(output))
                twin.add(parts[-1])
            readout = _pull(parts[-1] if self.head is None else twin.top(), parts, upstream)
        found = list(readout)
        layers: list[LayerGradients] = []
        for index, (layer, x, gates, state, zoneout) in reversed(list(enumerate(given))):
            above = found[index + 1]
            upstream = error.new_zeros(tokens.shape[1], rows, layer.output_size) if above is None else above
            entering, gate_gradients = layer.state_gradients(gates, state, upstream, zoneout)
            layers.append(LayerGradients(entering, upstream, readout[index + 1]))
            below = layer.input_gradients(x, gate_gradients)
            for number, gradient in enumerate(_pull(twins[index], parts[: index + 1], below)):
                if gradient is not None:
                    before = found[number]
                    found[number] = gradient if before is None else before + gradient
        assert found[0] is not None
        return Gradients(tuple(reversed(layers)), found[0])

    @torch.no_grad()
    def layer_inputs(self, tokens: Tensor, states: States) -> Iterator[LayerInput]:
        """What each layer reads, from the bottom up, in fp32 (float64), as in evaluation.

        Args:
            tokens: (B, T).
            states: one State a layer, entering the first step.
        """
        yield from self._through(self._stack(tokens.t(), self._wide()), states)

    def _through(self, stack: _Stack, states: States) -> Iterator[LayerInput]:
        """The same, of a stack that holds the embedded tokens and takes each layer's outputs."""
        for layer, state in zip(self._cells(), states, strict=True):
            x = stack.read()
            gates = layer.project(x)
            zoneout = self._mean_zoneout(gates.shape[:2], state) if self.zoneout else None
            yield LayerInput(layer, x, gates, state, zoneout)
            stack.add(layer.scan(gates, state, zoneout=zoneout)[0])

    def _stack(self, tokens: Tensor, dtype: torch.dtype, needed: bool = True) -> _Stack:
        """With the embedded tokens, where they are `needed` by the first layer or anything above reads them."""
        above = self.connections == "dense" or (self.connections == "residual" and self.embedding is not None)
        return _Stack(self.connections, self._embed(tokens, dtype) if needed or above else None, self.embedding is None)

    def _cells(self) -> list[Cell]:
        return list(self.layers)  # type: ignore[arg-type]

    def _wide(self) -> torch.dtype:
        """The parameters' dtype, in which logits are."""
        return next(self.parameters()).dtype

    def _device(self) -> str:
        return next(self.parameters()).device.type

    def _dtype(self) -> torch.dtype:
        return torch.float64 if self._wide() == torch.float64 else self.compute_dtype

    def _embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """(…) to (…, D) in `dtype`."""
        return inputs.embed(tokens, self.embedding, self.vocabulary_size, dtype)

    def _read_out(self, stack: _Stack) -> Tensor:
        """Logits: of the readout, or what the top cell has put out."""
        return stack.outputs[-1] if self.head is None else linear(stack.top(), self.head.weight, self.head.bias)

    def _by_table(self, count: int, masks: bool) -> bool:
        """Whether the first layer gathers its gates for `count` tokens from the table."""
        kernel = self._cells()[0].kernel(self._device(), self._dtype(), masks)
        return inputs.by_table(self.embedding, self.vocabulary_size, count, kernel)

    def _zoneout(self, layer: Cell, times: Sequence[int], state: State) -> State | None:
        """The window's masks, a State of (T, B, H), drawn anew; their mean in evaluation."""
        if not self.zoneout:
            return None
        if not self.training:
            return self._mean_zoneout(times, state)
        return map_state(
            lambda s: torch.empty(*times, s.shape[-1], dtype=s.dtype).bernoulli_(self.zoneout).to(s), state
        )

    def _mean_zoneout(self, times: Sequence[int], state: State) -> State:
        return map_state(lambda s: s.new_full((1, 1, 1), self.zoneout).expand(*times, s.shape[-1]), state)

    @contextmanager
    def _weight_drop(self, layer: Cell) -> Iterator[None]:
        """The layer with a part of its recurrent matrix left out."""
        name = layer.recurrent_weight
        if name is None or not self.weight_drop or not self.training:
            yield
            return
        whole = layer._parameters[name]
        assert whole is not None
        rows = layer.recurrent_rows
        dropped = F.dropout(whole[:rows], self.weight_drop)
        if rows is not None:
            dropped = torch.cat((dropped, whole[rows:]))
        layer._parameters[name] = dropped  # type: ignore[assignment]
        try:
            yield
        finally:
            layer._parameters[name] = whole


class _Stack:
    """What each layer reads, and the readout, given the outputs so far, for one kind of connections.

    Args:
        connections: "plain", "residual" or "dense".
        embedded: (…, D), the first layer's input, if anything reads it.
        one_hot: whether that is no vector that an output could be added to.
    """

    def __init__(self, connections: str, embedded: Tensor | None, one_hot: bool) -> None:
        self.dense, self.residual, self.one_hot = connections == "dense", connections == "residual", one_hot
        self.outputs: list[Tensor] = []
        self.x = embedded
        self._all = [] if embedded is None else [embedded]

    def read(self) -> Tensor:
        """The next layer's input."""
        assert self.x is not None
        return torch.cat(self._all, -1) if self.dense else self.x

    def add(self, output: Tensor) -> None:
        """Take the next layer's output."""
        self.outputs.append(output)
        self._all.append(output)
        below = None if self.one_hot and len(self.outputs) == 1 else self.x
        self.x = below + output if self.residual and below is not None and below.shape == output.shape else output

    def top(self) -> Tensor:
        """What the readout reads."""
        assert self.x is not None
        return torch.cat(self.outputs, -1) if self.dense else self.x
