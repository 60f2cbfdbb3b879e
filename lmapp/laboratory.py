"""Gradients of finished models: everything that is measured of a checkpoint, in words, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lmapp.checkpoint import BEST
from lmapp.data.tasks import task_of
from lmapp.errors import LmappError, UsageError
from lmapp.experiments.draw import QUANTILES, Sheet, draw_gradients
from lmapp.experiments.heatmaps import draw_influence, influence_levels
from lmapp.gradients.bounds import Bounds, conditions, measure_bounds
from lmapp.gradients.decay import (
    ALL,
    INPUTS,
    JOINT,
    Decay,
    cut_recurrence_warning,
    measure,
    not_defined,
    verdict,
)
from lmapp.gradients.gates import LayerGates, measure_gates
from lmapp.gradients.influence import by_character, influence
from lmapp.gradients.norms import ClipAdvice, NormHistogram, advice
from lmapp.gradients.spectrum import Spectrum, measure_spectrum, why_not
from lmapp.gradients.truncation import Truncation
from lmapp.gradients.weight_lags import WeightLags, measure_weight_lags
from lmapp.inference import LanguageModel, load
from lmapp.inference.generation import encode_text
from lmapp.inference.trained import Text, Trained
from lmapp.models import InfillModel, RecurrentModel, WindowModel
from lmapp.training import memory
from lmapp.training.probe import SEED, place
from lmapp.training.truncation import resolve
from lmapp.units import size

MOST_INFLUENCE = 4000
OWN = "the run's validation split"
NO_STATE = "there is no state"
SHOWN_LAGS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True)
class Measurement:
    """What was measured of one checkpoint.

    Attributes:
        label: its run's name.
        cell: of the network.
        step: of the training, at which it was written.
        text: what it was measured on.
        note: what differs from what was asked for, in words.
        truncation: of its training.
        decay: the gradient against lag.
        spectrum: of the state's Jacobian, or why there is none.
        bounds: on the top layer's decay, or why there are none.
        conditions: what its weights alone say about vanishing and exploding.
        gates: of each layer.
        weights: the recurrent weights' gradient by lag, of each layer that has such weights.
        norms: of every step of the training.
        advice: what these say about the threshold of clipping.
        threshold: of clipping.
    """

    label: str
    cell: str
    step: int
    text: str
    note: str
    truncation: Truncation
    decay: Decay
    spectrum: Spectrum | str
    bounds: Bounds | str
    conditions: list[str]
    gates: list[LayerGates]
    weights: list[WeightLags]
    norms: NormHistogram
    advice: ClipAdvice
    threshold: float | None

    @property
    def verdict(self) -> str:
        """What the truncation costs, and the warning if the recurrence is cut."""
        warning, cost = cut_recurrence_warning(self.decay), verdict(self.decay, self.truncation)
        return f"{warning}\n{cost}" if warning else cost

    def as_dict(self) -> dict[str, Any]:
        """As `lmapp gradients --json` prints it: figures by their logged names, and what they are from."""
        return {
            "label": self.label,
            "cell": self.cell,
            "step": self.step,
            "text": self.text,
            "note": self.note,
            "bptt": self.truncation.mode,
            "truncation_length": self.truncation.length,
            "figures": {
                **self.decay.scalars(),
                **({} if isinstance(self.spectrum, str) else self.spectrum.scalars()),
            },
            "intervals": {
                quoted.name: None
                if quoted.interval is None
                else {end: figure._asdict() for end, figure in quoted.interval._asdict().items()}
                for quoted in self.decay.summary()
            },
            "curves": self.decay.records(self.step),
            "spectrum": {"not_measured": self.spectrum} if isinstance(self.spectrum, str) else self.spectrum.as_dict(),
            "bounds": self.bounds.as_dict() if isinstance(self.bounds, Bounds) else {"not_defined": self.bounds},
            "conditions": self.conditions,
            "gates": [layer.as_dict() for layer in self.gates],
            "weight_gradient": [
                {
                    "layer": layer.layer,
                    "cell": layer.cell,
                    "weight": layer.weight,
                    "size": layer.size.tolist(),
                    "share": layer.share.tolist(),
                    "pairs": layer.pairs,
                    "left_out": layer.left_out,
                }
                for layer in self.weights
            ],
            "clipping": {
                "threshold": self.threshold,
                "quantity": self.advice.quantity,
                "share": self.advice.share,
                "mean": self.advice.mean,
                "quantiles": {f"{percent}": norm for percent, norm in self.advice.quantiles.items()},
                "suggested": self.advice.suggested,
                "advice": self.advice.sentence,
            },
            "verdict": self.verdict,
        }

    def lines(self) -> list[tuple[str, str]]:
        """The report: what each line is about, and what it says."""
        curve = self.decay.curve()
        shown = [k for k in SHOWN_LAGS if k <= curve.lags[-1]]
        del shown[1 : max(1, len(shown) - 7)]  # eight columns of eight characters fit beside the names in 80
        rows = [("note", self.note)] if self.note else []
        rows.append(("lag", "".join(f"{k:>8}" for k in shown)))
        for layer, title in ((ALL, "R states"), (INPUTS, "R inputs")):
            if (layer, JOINT) in self.decay.norms and self.decay.curve(layer).pairs:
                R = self.decay.curve(layer).R
                rows.append((title, "".join(f"{R[k]:>8.2g}" for k in shown)))
        rows += self._figures()
        rows += [(f"layer {layer}", f"half-life {self._components(layer)}") for layer in self._layers()]
        rows += self._spectral()
        for gates in self.gates:
            rows += self._gates(gates)
        if not self.weights and self.spectrum != NO_STATE:
            rows.append(("weights", "no cell here has recurrent weights of its own whose gradient has lags"))
        for weights in self.weights:
            if (half := weights.lag_holding(0.5)) is not None:
                most, nearly = weights.lag_holding(0.9), weights.lag_holding(0.99)
                where = f"layer {weights.layer}: " if len(self.weights) > 1 else ""
                rows.append(
                    (
                        "weights",
                        f"{where}half of {weights.weight}'s gradient comes from lags up to {half}, 90 % up to {most}, "
                        f"99 % up to {nearly} (shares of norms)",
                    )
                )
        if self.advice.mean is not None:
            quantiles = ", ".join(f"{percent} % {norm:.3g}" for percent, norm in self.advice.quantiles.items())
            rows.append(
                (
                    "norms",
                    f"{100 * self.advice.share:.1f} % of the steps were clipped; {self.advice.quantity} of the "
                    f"gradient: mean {self.advice.mean:.3g}, quantiles {quantiles}",
                )
            )
            rows.append(("threshold", self.advice.sentence))
        rows += [("verdict", line) for line in self.verdict.splitlines()]
        return rows

    def _layers(self) -> list[int]:
        numbers = sorted({layer for layer, _ in self.decay.norms if isinstance(layer, int)})
        components = {name for layer, name in self.decay.norms if isinstance(layer, int)}
        return numbers if len(numbers) > 1 or len(components) > 2 else []

    def _components(self, layer: int) -> str:
        names = [name for owner, name in self.decay.curves if owner == layer]
        return ", ".join(f"{name} {self.decay.figure('half_life', layer, name) or 'none'}" for name in names)

    def _figures(self) -> list[tuple[str, str]]:
        said = {
            "half_life": ("half-life", "{} steps"),
            "horizon": ("horizon", "{} steps, until 1 % is left"),
            "rate": ("rate", "{} a step"),
            "lag_99": ("99 %", "of the summed gradient norm lies within {} steps"),
            "at_truncation": ("R at τ", f"{{}} at lag {self.truncation.length}"),
            "lost_share": ("cut off", "{} of the summed gradient norm"),
        }
        rows = []
        for quoted in self.decay.summary():
            name, words = said[quoted.name]
            interval = "" if quoted.interval is None else f" (95 % interval {quoted.interval})"
            rows.append((name, words.format(quoted.figure) + interval))
        return rows

    def _spectral(self) -> list[tuple[str, str]]:
        if self.spectrum == NO_STATE:
            return []
        if isinstance(self.spectrum, str):
            rows = [("Jacobian", f"not measured: {self.spectrum}")]
        else:
            rows = self._jacobian(self.spectrum)
        if isinstance(self.bounds, Bounds):
            k = min(10, int(self.bounds.lags[-1]))
            rows.append(
                (
                    "bounds",
                    f"at lag {k}: measured {self.bounds.R[k]:.2g} ≤ product of norms {self.bounds.product[k]:.2g} "
                    f"≤ (γσ)^k {self.bounds.uniform[k]:.2g}, with γ = {self.bounds.gamma:g}, "
                    f"σ_max(W_hh) = {self.bounds.sigma_max:.3g}",
                )
            )
        else:
            rows.append(("bounds", f"not defined: {self.bounds}"))
        return [*rows, *(("therefore", sentence) for sentence in self.conditions)]

    def _jacobian(self, spectrum: Spectrum) -> list[tuple[str, str]]:
        rough = [
            name
            for name, settled in (("norm", spectrum.norms_settled), ("radius", spectrum.radii_settled))
            if not settled.all()
        ]
        settled = f" ({' and '.join(rough)}: not everywhere settled)" if rough else ""
        spread = spectrum.lyapunov_spread
        apart = "move apart" if spectrum.lyapunov > 0 else "come together"
        if abs(spectrum.lyapunov) < spread:
            apart = "keep their distance"
        rows = [
            (
                "Jacobian",
                f"of one step of all {spectrum.size:,} entries of the state: spectral norm {spectrum.norm:.4g}, "
                f"spectral radius {spectrum.radius:.4g}{settled}",
            ),
            (
                "Lyapunov",
                f"{spectrum.lyapunov:+.4f} a step (± {spread:.2g} over the windows), largest exponent over "
                f"{spectrum.steps} steps: nearby states {apart}",
            ),
        ]
        if (overlap := spectrum.overlap) is not None and overlap.pairs.any():
            used = [number for number in range(len(overlap.lags)) if overlap.pairs[number]]
            values = ", ".join(f"{overlap.values[n]:.2f} at lag {overlap.lags[n]}" for n in used)
            note = f" ({overlap.note})" if overlap.note else ""
            rows.append(
                ("direction", f"overlap of the gradient with the {overlap.reference} it should turn to: {values}{note}")
            )
        return rows

    def _gates(self, layer: LayerGates) -> list[tuple[str, str]]:
        where = f"layer {layer.layer}: " if len(self.gates) > 1 else ""
        parts = []
        for gate in layer.gates:
            ends = [] if gate.low is None else [f"{100 * gate.low:.0f} % low"]
            ends += [] if gate.high is None else [f"{100 * gate.high:.0f} % high"]
            ends += [] if gate.dead is None else [f"{100 * gate.dead:.0f} % of units dead"]
            parts.append(f"{gate.name} {gate.mean:.2f}" + (f" ({', '.join(ends)})" if ends else ""))
        rows = [("gates", where + "means " + ", ".join(parts))] if parts else []
        if (kept := layer.retention) is not None:
            low, middle, high = kept.time_constants
            measured = self.decay.figure("half_life", layer.layer) or "none"
            rows.append(
                (
                    "keeping",
                    f"{where}{kept.gate} keeps {kept.mean:.3f} of the state a step in the mean; were it always so, the "
                    f"half-life would be {kept.half_life:.3g} steps (measured of the gradient: {measured}); time "
                    f"constants of units {low:.3g}, {middle:.3g}, {high:.3g} (10, 50, 90 %)",
                )
            )
        return rows


def measure_checkpoints(
    names: Sequence[str],
    *,
    paths: Sequence[str] = (),
    encoding: str | None = None,
    column: str | None = None,
    max_lag: int | None = None,
    windows: int = 8,
    runs_dir: str = "runs",
    cache_dir: str | None = None,
) -> list[Measurement]:
    """Measure each checkpoint's gradients on a text, by default its run's own validation split.

    Args:
        names: files, run directories or names of runs.
        paths: the text's files, named as in training.
        encoding: of these files; by default as in training.
        column: of rows, that holds the text; by default as in training.
        max_lag: K; by default twice the steps that a loss of each run looks back at most, and no more than 512.
        windows: of text, the same at every call.
        runs_dir: where names of runs are looked up.
        cache_dir: where encoded text is kept.

    Raises:
        LmappError: a checkpoint or text is not there, or the text is too short.
    """
    measured = []
    for language in [load(name, runs_dir=runs_dir) for name in names]:
        if isinstance(language.model, InfillModel):
            raise UsageError(f"{language.path} has no gradient decay: {not_defined(language.config.model.kind)}.")
        text = language.text(paths, encoding=encoding, column=column, cache_dir=cache_dir)
        train = None if paths else language.text(split="train", cache_dir=cache_dir)
        measured.append(_measure(language, text, train, max_lag, windows))
    return measured


def _measure(language: Trained, text: Text, train: Text | None, max_lag: int | None, windows: int) -> Measurement:
    """On a text, or on the run's own, whose training text stands in where the validation text is too short."""
    model, config, plan = language.model, language.config, language.saved["plan"]
    assert isinstance(model, RecurrentModel | WindowModel)
    # The plan knows what τ came to on the text of the training, whose rows are not known here.
    truncation = replace(resolve(config.train, plan["sequence_length"]), length=plan["truncation_length"])
    shape, note, ids = place(
        config,
        truncation,
        text.ids,
        text.ids[:0] if train is None else train.ids,
        task=None if train is None else task_of(config.data),
        windows=windows,
        max_lag=max_lag,
    )
    if shape is None or ids is None:
        raise LmappError(f"{language.path}, on {text.name}: {note}.\nName a longer text: --data.path FILE")
    if train is not None and shape.source == "train":
        text = train
    _check_finite(language)
    there, need = memory.available(torch.device("cpu")), 2 * memory.probed(model, shape)
    if there is not None and need > there:
        raise UsageError(
            f"This needs about {size(need)} of memory, and {size(there)} are available.\n"
            "Try fewer --windows or a smaller --max-lag."
        )
    probe = torch.from_numpy(ids)
    decay = measure(model, probe, shape)
    spectrum: Spectrum | str = NO_STATE
    bounds: Bounds | str = NO_STATE
    said: list[str] = []
    gates: list[LayerGates] = []
    weights: list[WeightLags] = []
    if isinstance(model, RecurrentModel):
        spectrum = why_not(model) or measure_spectrum(model, probe, shape, seed=SEED, dense=True, overlap=True)
        bounds, said = measure_bounds(model, probe, shape, decay), conditions(model)
        gates, weights = measure_gates(model, probe, shape), measure_weight_lags(model, probe, shape)
    progress, options = language.saved["progress"], config.train
    norms, by_value = NormHistogram(**progress["norms"]), options.clip_value is not None
    threshold = options.clip_value if by_value else options.clip_norm
    return Measurement(
        label=_label(language),
        cell=config.model.label,
        step=language.step,
        text=text.name,
        note=note,
        truncation=truncation,
        decay=decay,
        spectrum=spectrum,
        bounds=bounds,
        conditions=said,
        gates=gates,
        weights=weights,
        norms=norms,
        advice=advice(norms, threshold, progress["clip_events"], by_value=by_value),
        threshold=threshold,
    )


def _check_finite(language: Trained) -> None:
    if not all(bool(parameter.isfinite().all()) for parameter in language.model.parameters()):
        raise LmappError(f"{language.path}: the network's weights are not finite, so there is nothing to measure.")


def draw(measured: Sequence[Measurement], path: Path) -> None:
    """Draw the four panels into a PNG: decay with bounds, spectrum, weight gradient by lag, norms."""
    sheets = []
    for m in measured:
        curve, half_life = m.decay.curve(), m.decay.figure("half_life")
        spectrum, bounds = m.spectrum, m.bounds
        half_weights = m.weights[-1].lag_holding(0.5) if m.weights else None
        sheets.append(
            Sheet(
                label=m.label,
                cell=m.cell,
                lags=curve.lags.tolist(),
                R=curve.R.tolist(),
                zero_share=curve.zero_share.tolist(),
                half_life=None if half_life is None else half_life.value,
                censored=half_life is not None and half_life.censored,
                bounds=(bounds.product.tolist(), bounds.uniform.tolist()) if isinstance(bounds, Bounds) else None,
                eigenvalues=None if isinstance(spectrum, str) else spectrum.eigenvalues,
                radius=None if isinstance(spectrum, str) else spectrum.radius,
                weight_share=m.weights[-1].cumulative_size.tolist() if half_weights is not None else None,
                half_weights=f"{half_weights}" + (" (top layer)" if len(m.weights) > 1 else ""),
                norms=[m.norms.quantile(q) for q in QUANTILES] if m.norms.count else None,
                threshold=m.threshold,
            )
        )
    texts = {m.text for m in measured}
    own = texts == {OWN} and len(measured) > 1
    title = f"Gradients on {texts.pop()}" if len(texts) == 1 else "Gradients"
    title = "Gradients, each on its own run's validation split" if own else title
    draw_gradients(sheets, path, title=title)


@dataclass(frozen=True)
class Influence:
    """What the prediction of a text's last character rests on.

    Attributes:
        label: the run's name.
        characters: (N,) all before the predicted one.
        norms: (N,) of the gradient of its loss on each.
        predicted: the last one.
    """

    label: str
    characters: list[str]
    norms: list[float]
    predicted: str

    @property
    def levels(self) -> list[float]:
        """(N,) 0 to 1 of each norm, by its logarithm, as the picture has it."""
        return influence_levels(self.norms).tolist()

    def most(self, number: int = 8) -> list[tuple[int, str, float]]:
        """The characters with the largest norms: how many characters before the predicted one, which, and the norm."""
        order = sorted(range(len(self.norms)), key=lambda place: -self.norms[place])[:number]
        return [(len(self.norms) - place, self.characters[place], self.norms[place]) for place in order]

    def as_dict(self) -> dict[str, Any]:
        """As `lmapp gradients --json` prints it."""
        return {"label": self.label, "characters": self.characters, "norms": self.norms, "predicted": self.predicted}


def measure_influence(name: str, text: str, *, runs_dir: str = "runs") -> Influence:
    """The norm of the gradient of a text's last character's loss on each character before it.

    Args:
        name: a file, a run's directory or its name.
        text: at least two characters; the network reads it from its initial state.
        runs_dir: where names of runs are looked up.

    Raises:
        LmappError: the checkpoint is not there, the text is too short or has a character the model does not know.
    """
    language = load(name, runs_dir=runs_dir)
    if not isinstance(language, LanguageModel):
        raise UsageError(f"{language.path} has no influence to follow: {not_defined(language.config.model.kind)}.")
    text = language.prepared(text)
    if len(text) < 2:
        raise UsageError("--influence needs a text of at least 2 characters: the last is predicted from the others.")
    if len(text) > MOST_INFLUENCE:
        raise UsageError(f"--influence takes a text of at most {MOST_INFLUENCE:,} characters, not {len(text):,}.")
    _check_finite(language)
    ids = torch.tensor(encode_text(language.vocabulary, text, "text"))
    starts = torch.from_numpy(language.vocabulary.starts_character[ids.numpy()].copy())
    first = int(starts.nonzero()[-1])
    model = language.model
    norms = by_character(influence(model, ids, first), starts[:first])
    if not bool(norms.isfinite().all()):
        raise LmappError(f"{language.path}: the gradient overflows on its way back over this text: it explodes.")
    return Influence(_label(language), list(text[:-1]), norms.tolist(), text[-1])


def _label(language: Trained) -> str:
    """What a checkpoint is called: its run, and which one it is unless the best."""
    path = language.path
    if path.parent.name != "checkpoints":
        return path.name
    return path.parent.parent.name + ("" if path.name == BEST else f" ({path.stem})")


def draw_influences(found: Influence, path: Path) -> None:
    """Draw it as a heat map over the text, into a PNG."""
    title = f"What {found.label}'s prediction of {found.predicted!r} rests on: gradient norm on each character before"
    draw_influence(found.characters, found.norms, found.predicted, path, title)
