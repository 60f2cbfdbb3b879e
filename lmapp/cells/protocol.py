"""What a recurrent cell is, and everything that follows from its single step.

Shapes: B batch, T time, D input, H hidden, G gate_size. Time comes first inside a cell.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lmapp.cells.products import linear, product, stacked_product
from lmapp.errors import UsageError

State: TypeAlias = Any
"""A NamedTuple of tensors (B, H), fp32 (float64 in float64); its field names are the state's components."""


class HiddenState(NamedTuple):
    """The state of a cell that carries nothing but its output."""

    h: Tensor


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The same state with `function` applied to each component."""
    return type(state)(*map(function, state))


def map_states(function: Callable[..., Tensor], *states: State) -> State:
    """The state made by `function` of the same component of each of `states`."""
    return type(states[0])(*map(function, *states))


def at(states: State | None, t: int) -> State | None:
    """Step t of a State of (T, B, H), if there is one."""
    return None if states is None else map_state(lambda s: s[t], states)


class Masks(NamedTuple):
    """What a scan does to the states between its steps, as in `Cell.scan`; keep and credit in the state's dtype."""

    keep: Tensor | None = None
    credit: Tensor | None = None
    zoneout: State | None = None

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """Those that multiply the gradient of the state entering a step: (T, B) each."""
        return tuple(mask for mask in (self.keep, self.credit) if mask is not None)

    @property
    def none(self) -> bool:
        """Whether nothing is masked."""
        return self.keep is None and self.credit is None and self.zoneout is None


class Cell(nn.Module):
    """A recurrence. A subclass gives `state_type`, `gate_size`, `project` and `step`; all else follows from these.

    Its constructor draws the parameters, and draws them on torch's meta device too, where nothing has a value.
    `project` computes in its input's dtype, `step` and `scan` in that of the gates, to which the weights are cast.
    """

    state_type: ClassVar[type[Any]]
    gate_size: int
    options: ClassVar[tuple[str, ...]] = ()
    """Options of the network that the constructor takes by name: of `activation` and `bias`."""
    reads_out: ClassVar[bool] = False
    """Whether the outputs are the logits; the constructor then takes `output_size`, the number of them."""
    recurrent_weight: ClassVar[str | None] = None
    """The parameter that weight drop acts on."""
    recurrent_rows: int | None = None
    """How many of that parameter's rows, from the first, are recurrent; None for all."""
    remembers: ClassVar[bool] = False
    """Whether a gate keeps the state, so that `set_memory_bias` has one to set."""
    retention: ClassVar[str | None] = None
    """Which of `gate_values` multiplies the old state (its last component), if one does."""
    gate_functions: Mapping[str, str] = {}
    """The non-linearity that made each of `gate_values`: "sigmoid", "tanh", "relu"; another or none has no limits."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.output_size = hidden_size

    def reset_parameters(self, init: str = "orthogonal", fan_in: float | None = None) -> None:
        """Draw the parameters anew from torch's global generator; unless overridden, what the constructor drew stays.

        Args:
            init: "orthogonal", "identity" or "torch".
            fan_in: the squared length of an input: 1 for a one-hot one, D (entries of size 1) unless given.
        """

    def set_memory_bias(self, bias: float | None, longest: float | None) -> None:
        """Set the bias of the gate that keeps the state, to `bias` or by chrono initialisation up to T_max `longest`.

        Raises:
            UsageError: the cell has no such gate.
        """
        raise UsageError(
            f"--model.{'chrono' if bias is None else 'forget-bias'} sets the bias of the gate that keeps the state; "
            f"{type(self).__name__} has none."
        )

    def project(self, x: Tensor) -> Tensor:
        """The input's half of the gates, with every bias that is only added: (…, D) to (…, G)."""
        raise NotImplementedError

    def step(self, gates: Tensor, state: State) -> tuple[Tensor, State]:
        """One step in plain differentiable operations: gates (B, G) and state to output (B, output_size) and state."""
        raise NotImplementedError

    def gate_values(self, gates: Tensor, state: State) -> dict[str, Tensor]:
        """What `step` computes on its way, after the non-linearities, by name: (…, H) each, of gates (…, G) and state.

        A cell need not say: there are none unless it does.
        """
        return {}

    @cached_property
    def output_component(self) -> str | None:
        """The state's component that `step` puts out, None if it puts out something else.

        A class may say so itself, as `output_component = "h"`; otherwise it is found by taking one step.
        """

        def spread(like: Tensor) -> Tensor:
            return torch.linspace(-1, 1, like.numel(), dtype=like.dtype, device=like.device).view_as(like)

        with torch.no_grad():
            state = map_state(spread, self.initial_state(2))
            output, new = self.step(spread(state[0].new_empty(2, self.gate_size)), state)
        return next((name for name in new._fields if torch.equal(getattr(new, name), output)), None)

    def zone(self, output: Tensor, old: State, new: State, zoneout: State) -> tuple[Tensor, State]:
        """What `step` gives under zoneout (Krueger et al. 2017, arXiv:1606.01305): 1 keeps the old value, 0 the new.

        Args:
            output: of the step from `old` to `new`.
            old: the state that entered it.
            new: the state it made.
            zoneout: a State of (B, H) masks, or of their mean.

        Returns:
            output and state; where the output is a component of the state, it is that component mixed so.
        """
        state = map_states(lambda before, after, mask: mask * before + (1 - mask) * after, old, new, zoneout)
        name = self.output_component
        return (output if name is None else getattr(state, name).to(output.dtype)), state

    def initial_state(self, batch_size: int) -> State:
        """The state before the first character: zeros."""
        parameter = next(self.parameters())
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        shape = (batch_size, self.hidden_size)
        return self.state_type(
            *(torch.zeros(shape, dtype=dtype, device=parameter.device) for _ in self.state_type._fields)
        )

    def table(self) -> Tensor:
        """`project` of every one-hot input at once: (D, G), in the parameters' dtype."""
        parameter = next(self.parameters())
        return self.project(torch.eye(self.input_size, dtype=parameter.dtype, device=parameter.device))

    def kernel(self, device_type: str, dtype: torch.dtype, masks: bool) -> str:
        """Which implementation `forward` runs: "scan", or "torch" for torch.nn's kernel. A rule, never a timing."""
        return "scan"

    def scan(
        self,
        gates: Tensor,
        state: State,
        keep: Tensor | None = None,
        credit: Tensor | None = None,
        zoneout: State | None = None,
    ) -> tuple[Tensor, State]:
        """`step` over time.

        Args:
            gates: (T, B, G).
            state: the state entering the first step.
            keep: (T, B), multiplies the state entering step t (0: a new document starts there).
            credit: (T, B), multiplies only the gradient of that state (0: truncation of the gradient there).
            zoneout: a State of (T, B, H), the part of each entry that keeps its old value.

        Returns:
            outputs (T, B, output_size) and the state after the last step.
        """
        outputs = []
        for t in range(gates.shape[0]):
            if keep is not None:
                state = type(state)(*(s * keep[t].unsqueeze(1).to(s.dtype) for s in state))
            if credit is not None:
                share = credit[t].unsqueeze(1).to(state[0].dtype)
                # s − s.detach() is zero, so that the value stays exactly the same.
                state = type(state)(*(s.detach() + share * (s - s.detach()) for s in state))
            output, state = self._zoned_step(gates[t], state, at(zoneout, t))
            outputs.append(output)
        return torch.stack(outputs), state

    def forward(
        self,
        x: Tensor,
        state: State,
        keep: Tensor | None = None,
        credit: Tensor | None = None,
        zoneout: State | None = None,
    ) -> tuple[Tensor, State]:
        """Inputs (T, B, D) to outputs (T, B, output_size) and the last state; masks as in `scan`."""
        return self.scan(self.project(x), state, keep, credit, zoneout)

    def _zoned_step(self, gates: Tensor, state: State, zoneout: State | None) -> tuple[Tensor, State]:
        output, new = self.step(gates, state)
        return (output, new) if zoneout is None else self.zone(output, state, new, zoneout)

    def input_gradients(self, x: Tensor, gate_gradients: Tensor) -> Tensor:
        """From ∂J/∂gates (T, R, G) to ∂J/∂x (T, R, D); x (T, B, D), R = B·m as in `state_gradients`."""
        with torch.enable_grad():
            leaf = x.detach().repeat_interleave(gate_gradients.shape[1] // x.shape[1], 1).requires_grad_()
            return torch.autograd.grad(self.project(leaf), leaf, gate_gradients)[0]

    def state_gradients(
        self, gates: Tensor, state: State, output_gradients: Tensor, zoneout: State | None = None
    ) -> tuple[State, Tensor]:
        """Gradients of J with respect to the states that each step reads, along the recurrence alone.

        Args:
            gates: (T, B, G).
            state: the state entering the first step.
            output_gradients: (T, R, output_size), ∂J/∂output; R = B·m rows, m consecutive ones for each row of gates.
            zoneout: as in `scan`.

        Returns:
            entering: a State of (T+1, R, H); entry t is ∂J/∂(state entering step t), entry T is zero.
            gate_gradients: (T, R, G).
        """
        steps = gates.shape[0]
        repeats = output_gradients.shape[1] // gates.shape[1]
        with torch.enable_grad():
            leaf = gates.detach().repeat_interleave(repeats, 1).requires_grad_()
            state = map_state(lambda s: s.detach().repeat_interleave(repeats, 0).requires_grad_(), state)
            if zoneout is not None:
                zoneout = map_state(lambda z: z.repeat_interleave(repeats, 1), zoneout)
            entering, outputs = [], []
            for t in range(steps):
                # A view is a node of its own: what step t reads, apart from what leaves step t−1 as its output.
                state = map_state(lambda s: s.view_as(s), state)
                entering.append(state)
                output, state = self._zoned_step(leaf[t], state, at(zoneout, t))
                outputs.append(output)
            leaves = [component for entry in entering for component in entry]
            gradients = torch.autograd.grad(
                torch.stack(outputs), [leaf, *leaves], output_gradients.to(gates.dtype), allow_unused=True
            )
        filled = [torch.zeros_like(s) if g is None else g for g, s in zip(gradients[1:], leaves, strict=True)]
        width = len(state)
        zero = torch.zeros_like(leaves[0])
        columns = (torch.stack([*filled[index::width], zero]) for index in range(width))
        gate_gradients = torch.zeros_like(leaf) if gradients[0] is None else gradients[0]
        return type(state)(*columns), gate_gradients


class GatedCell(Cell):
    """A cell with a recurrent matrix and a backward pass of its own.

    Its parameters carry torch.nn's names (without the layer's suffix), shapes and gate order where torch.nn has the
    cell: weight_ih (G, D), weight_hh (G, H), bias_ih (G,) and bias_hh (G,), where G = blocks·H, and V more if the cell
    reads out. Without `bias` the last two are None. A subclass adds `run`, `back` and `recurrent_factors`; from them
    follow `scan`, which costs one small product a step in each direction and one large one for the gradient of
    weight_hh, and `state_gradients`. `torch_forward` is what runs where `kernel` says "torch".
    """

    state_type = HiddenState
    options: ClassVar[tuple[str, ...]] = ("bias",)
    recurrent_weight = "weight_hh"
    output_component: ClassVar[str | None] = "h"
    blocks: ClassVar[int]
    biases: ClassVar[tuple[str, ...]] = ("bias_ih", "bias_hh")
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None
    memory_gates: ClassVar[dict[int, int]] = {}
    """Where `remembers`: blocks of the gates that chrono initialisation sets, and the sign of log U; +1 keeps."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, output_size: int | None = None) -> None:
        super().__init__(input_size, hidden_size)
        self.gate_size = self.blocks * hidden_size
        if output_size is not None:
            self.output_size = output_size
            self.recurrent_rows = self.gate_size
            self.gate_size += output_size
        self.weight_ih = nn.Parameter(torch.empty(self.gate_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(self.gate_size, hidden_size))
        for name in ("bias_ih", "bias_hh"):
            present = bias and name in self.biases
            self.register_parameter(name, nn.Parameter(torch.empty(self.gate_size)) if present else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, init: str = "orthogonal", fan_in: float | None = None) -> None:
        """Draw the parameters anew.

        "torch": everything uniform in ±1/√H. "orthogonal" and "identity": each gate's H×H block of weight_hh is that,
        weight_ih uniform in ±√(3/fan_in), so that inputs of size 1 make gates of variance 1, biases 0. After one pass
        over tiny Shakespeare's one-hot characters that bound, √3, led 1 by 0.04 (GRU), 0.13 (LSTM) and 0.08 nats
        (vanilla). The V rows of a cell that reads out are no gates but a readout of D + H entries: they are drawn as
        every other readout is, by nn.Linear's rule uniform in ±1/√(D + H), so that the first logits are small.
        """
        if init == "torch":
            bound = self.hidden_size**-0.5
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -bound, bound)
            return
        if init not in ("orthogonal", "identity"):
            raise ValueError(f"init is 'orthogonal', 'identity' or 'torch', not {init!r}")
        gates = self.blocks * self.hidden_size
        for block in self.weight_hh[:gates].split(self.hidden_size):
            (nn.init.eye_ if init == "identity" else nn.init.orthogonal_)(block)
        bound = (3 / (fan_in or self.input_size)) ** 0.5
        nn.init.uniform_(self.weight_ih[:gates], -bound, bound)
        if gates < self.gate_size:
            bound = (self.input_size + self.hidden_size) ** -0.5
            for weight in (self.weight_ih, self.weight_hh):
                nn.init.uniform_(weight[gates:], -bound, bound)
        for bias in (self.bias_ih, self.bias_hh):
            if bias is not None:
                nn.init.zeros_(bias)

    @torch.no_grad()
    def set_memory_bias(self, bias: float | None, longest: float | None) -> None:
        """As every cell; all of it in bias_ih, bias_hh is 0 there.

        Chrono initialisation (Tallec & Ollivier 2018, arXiv:1804.11188): log U(1, T_max − 1) on the gate that keeps the
        state, its negative on a gate that lets the new in.
        """
        if not self.remembers or self.bias_ih is None:
            super().set_memory_bias(bias, longest)
        size = self.hidden_size
        drawn = bias if longest is None else torch.empty(size).uniform_(1, longest - 1).log_()
        for block, sign in self.memory_gates.items():
            if sign == 1 or longest is not None:
                rows = slice(block * size, (block + 1) * size)
                assert self.bias_ih is not None and self.bias_hh is not None
                self.bias_ih[rows] = sign * drawn  # type: ignore[operator]
                self.bias_hh[rows] = 0

    def input_bias(self) -> Tensor | None:
        """The biases (G,) that are only added to the gates."""
        return self.bias_ih if self.bias_ih is None or self.bias_hh is None else self.bias_ih + self.bias_hh

    def project(self, x: Tensor) -> Tensor:  # noqa: D102
        return linear(x, self.weight_ih, self.input_bias())

    def table(self) -> Tensor:  # noqa: D102
        table, bias = self.weight_ih.t().contiguous(), self.input_bias()
        return table if bias is None else table + bias

    def weights(self) -> tuple[Tensor, ...]:
        """The parameters that `step` reads."""
        return (self.weight_hh,)

    def run(
        self, weights: tuple[Tensor, ...], gates: Tensor, state: State, masks: Masks
    ) -> tuple[Tensor, State, tuple[Tensor, ...]]:
        """The forward pass without a graph: outputs, the last state, and the tensors that `back` needs."""
        raise NotImplementedError

    def back(
        self,
        weights: tuple[Tensor, ...],
        trace: tuple[Tensor, ...],
        output_gradients: Tensor,
        last: State,
        entering: State | None,
        masks: Masks,
    ) -> tuple[Tensor, State]:
        """The backward pass over R = B·m rows, m consecutive ones for each row of `trace`.

        Args:
            weights: as `run` had them.
            trace: from `run`.
            output_gradients: (T, R, output_size), in the gates' dtype.
            last: gradients (R, H) of the last state, overwritten.
            entering: a State of (T+1, R, H) to write each step's ∂J/∂(state entering it) into.
            masks: as `run` had them; keep and credit only where m = 1.

        Returns:
            deltas (T, R, …), in the gates' dtype, the rest of whose meaning is the cell's, and the gradients of the
            first state.
        """
        raise NotImplementedError

    def gate_gradients(self, deltas: Tensor) -> Tensor:
        """The part of `deltas` that is the gradient of the gates: (T, R, G)."""
        return deltas

    def recurrent_factors(self, trace: tuple[Tensor, ...], deltas: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What the gradient of weight_hh's recurrent rows is made of, a sum of outer products δ ⊗ h for each step.

        Returns:
            for each block of these rows δ (T, R, rows) and h (T, B, H). The blocks stand in an order of the cell's own;
            `parameter_gradients` is to put them right where that is not the weight's.
        """
        raise NotImplementedError

    def parameter_gradients(self, trace: tuple[Tensor, ...], deltas: Tensor) -> tuple[Tensor, ...]:
        """Gradients of `weights`."""
        factors = self.recurrent_factors(trace, deltas)
        blocks = [stacked_product(delta, h).to(self.weight_hh.dtype) for delta, h in factors]
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks),)

    def input_gradients(self, x: Tensor, gate_gradients: Tensor) -> Tensor:  # noqa: D102
        rows = gate_gradients.flatten(0, 1)
        return product(rows, self.weight_ih.to(rows.dtype).t()).view(*gate_gradients.shape[:2], -1)

    def torch_forward(self, x: Tensor, hidden: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        """torch.nn's kernel: x (T, B, D) and hidden, (1, B, H) each, to outputs (T, B, H) and the last hidden.

        `weights` are weight_ih, weight_hh and, if there are any, bias_ih and bias_hh.
        """
        raise NotImplementedError

    def forward(  # noqa: D102
        self,
        x: Tensor,
        state: State,
        keep: Tensor | None = None,
        credit: Tensor | None = None,
        zoneout: State | None = None,
    ) -> tuple[Tensor, State]:
        if self.kernel(x.device.type, x.dtype, not Masks(keep, credit, zoneout).none) == "scan":
            return self.scan(self.project(x), state, keep, credit, zoneout)
        weights = [w.to(x.dtype) for w in (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh) if w is not None]
        with _in_pieces(x.is_cuda):
            outputs, *last = self.torch_forward(x, [s.to(x.dtype).unsqueeze(0) for s in state], weights)
        return outputs, self.state_type(*(s.squeeze(0).to(state[0].dtype) for s in last))

    def scan(  # noqa: D102
        self,
        gates: Tensor,
        state: State,
        keep: Tensor | None = None,
        credit: Tensor | None = None,
        zoneout: State | None = None,
    ) -> tuple[Tensor, State]:
        wide = state[0].dtype
        masks = Masks(None if keep is None else keep.to(wide), None if credit is None else credit.to(wide), zoneout)
        outputs, *last = _Scan.apply(self, masks, gates, *self.weights(), *state)
        return outputs, self.state_type(*last)

    @torch.no_grad()
    def state_gradients(  # noqa: D102
        self, gates: Tensor, state: State, output_gradients: Tensor, zoneout: State | None = None
    ) -> tuple[State, Tensor]:
        masks, weights = Masks(zoneout=zoneout), self.weights()
        _, _, trace = self.run(weights, gates, state, masks)
        steps, rows, _ = output_gradients.shape
        last = map_state(lambda s: s.new_zeros(rows, self.hidden_size), state)
        entering = map_state(lambda s: s.new_zeros(steps + 1, rows, self.hidden_size), state)
        deltas, _ = self.back(weights, trace, output_gradients.to(gates.dtype).contiguous(), last, entering, masks)
        return entering, self.gate_gradients(deltas)


@contextmanager
def _in_pieces(cuda: bool) -> Iterator[None]:
    """Without cuDNN's wish for weights in one piece of memory: they are cast anew for every window anyway."""
    if not cuda:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def state_buffers(gates: Tensor, h: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for the h entering each step and for the outputs, (T, B, H) each, in the gates' dtype; entry 0 is `h`.

    Without `keep` both are one piece of memory, shifted by a step: writing an output is writing what enters next.
    """
    steps = gates.shape[0]
    if keep is not None:
        return gates.new_empty(steps, *h.shape), gates.new_empty(steps, *h.shape)
    both = gates.new_empty(steps + 1, *h.shape)
    both[0] = h
    return both[:-1], both[1:]


def blocks_backward(steps: int, elements: int) -> Iterator[range]:
    """The steps from the last to the first, in blocks whose temporaries stay in the cache at `elements` a step."""
    length = max(1, 2**20 // elements)
    for stop in range(steps, 0, -length):
        yield range(max(0, stop - length), stop)


class _Scan(torch.autograd.Function):
    """`GatedCell.scan`: the whole window is one node of the graph."""

    @staticmethod
    def forward(ctx: Any, cell: GatedCell, masks: Masks, gates: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        width = len(cell.state_type._fields)
        weights, state = tensors[:-width], cell.state_type(*tensors[-width:])
        outputs, last, trace = cell.run(weights, gates, state, masks)
        ctx.cell, ctx.masks, ctx.count = cell, masks, len(weights)
        # The weights are saved so that a change of them before the backward pass is noticed.
        ctx.save_for_backward(*weights, *trace)
        return outputs, *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradients: Tensor, *last: Tensor) -> tuple[Tensor | None, ...]:
        cell, weights, trace = ctx.cell, ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        gradients = cell.state_type(*(gradient.clone() for gradient in last))
        deltas, first = cell.back(weights, trace, output_gradients.contiguous(), gradients, None, ctx.masks)
        found: tuple[Tensor | None, ...] = (None,) * ctx.count
        if any(ctx.needs_input_grad[3 : 3 + ctx.count]):
            found = cell.parameter_gradients(trace, deltas)
        return None, None, cell.gate_gradients(deltas), *found, *first
