"""The figures' arithmetic: every target once, whatever the batch."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch

from lmapp.cells.protocol import HiddenState
from lmapp.errors import LmappError
from lmapp.models import InfillModel, RecurrentModel, WindowModel, evaluation
from lmapp.models.evaluation import Score, evaluate, evaluate_cold, evaluate_infill

V = 50
STARTS, SIZES = np.ones(V, dtype=bool), np.ones(V, dtype=np.int64)


class Remembering(torch.nn.Module):
    """Uniform over its symbols; its state is how many ids it has read in a row, and it notes what it reads."""

    def __init__(self, symbols=V):
        super().__init__()
        self.symbols, self.reads = symbols, []

    def initial_state(self, batch_size):
        return (HiddenState(torch.zeros(batch_size, 1)),)

    def forward(self, tokens, states):
        assert not self.training
        assert not torch.is_grad_enabled()
        count = states[0].h + torch.arange(1, tokens.shape[1] + 1)
        self.reads.append((tokens.clone(), count.clone()))
        logits = torch.zeros(*tokens.shape, self.symbols)
        return logits, (HiddenState(count[:, -1:]),)


class Weighing(Remembering):
    """Target id y costs y nats more than target 0 (up to the constant log Z)."""

    def forward(self, tokens, states):
        logits, states = super().forward(tokens, states)
        return logits - torch.arange(self.symbols), states

    @property
    def constant(self):
        return math.log(sum(math.exp(-y) for y in range(self.symbols)))


@pytest.mark.parametrize("function", [evaluate, evaluate_cold])
def test_a_uniform_model_has_the_perplexity_of_its_alphabet(function):
    score = function(Remembering(), np.arange(3000) % V, STARTS, SIZES, batch_size=4)
    assert score.perplexity == pytest.approx(50, rel=1e-6)
    assert score.loss == pytest.approx(math.log(50), rel=1e-6)
    assert (score.bits_per_char, score.bits_per_byte) == pytest.approx((math.log2(50), math.log2(50)), rel=1e-6)


@pytest.mark.parametrize("count", [2, 3, 511, 512, 1023, 1024, 1025, 1026, 5000, 5119, 5121])
@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("chunk", [256, 100])
def test_every_target_is_scored_once(count, batch_size, chunk):
    ids = np.random.default_rng(0).integers(0, V, count)
    model = Weighing()
    score = evaluate(model, ids, STARTS, SIZES, batch_size=batch_size, chunk=chunk)
    assert score.characters == count - 1
    assert score.loss_sum == pytest.approx(ids[1:].sum() + (count - 1) * model.constant, rel=1e-6)


@pytest.mark.parametrize(("count", "batch_size"), [(5000, 7), (1024, 2), (1030, 9), (700, 3), (5121, 10)])
def test_rows_and_their_warm_up(count, batch_size):
    """Each target but row 0's is predicted after 512 ids before its row, and after all that its row has read."""
    ids = np.arange(count)
    model = Remembering(count)
    evaluate(model, ids, np.ones(count, dtype=bool), np.ones(count, dtype=int), batch_size=batch_size)
    rows = max(1, min(batch_size, count // 512))
    warm, scoring = [r for r in model.reads if len(r[0]) == rows - 1], [r for r in model.reads if len(r[0]) == rows]
    if rows == 1:
        warm = []
    assert sum(tokens.shape[1] for tokens, _ in warm) == (512 if rows > 1 else 0)
    tokens = torch.cat([t for t, _ in scoring], 1)
    past = torch.cat([c for _, c in scoring], 1)
    assert tokens[0].tolist() == list(range(tokens.shape[1]))
    assert past[0, 0] == 1
    assert (past[1:, 0] == 513).all()
    lengths = torch.diff(tokens[:, 0], append=torch.tensor([count - 1]))
    assert lengths.max() - lengths.min() <= 1
    if rows > 1:
        before = torch.cat([t for t, _ in warm], 1)
        assert torch.equal(before, tokens[1:, :1] - 512 + torch.arange(512))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_loss_hardly_depends_on_the_batch_size(cell):
    torch.manual_seed(0)
    model = RecurrentModel(12, cell=cell, hidden_size=16, num_layers=1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    ids = np.random.default_rng(0).integers(0, 12, 9000)
    starts, sizes = np.ones(12, dtype=bool), np.ones(12, dtype=int)
    losses = [evaluate(model, ids, starts, sizes, batch_size=size).loss for size in (1, 2, 16, 17)]
    assert max(losses) - min(losses) < 1e-3
    assert losses == [evaluate(model, ids, starts, sizes, batch_size=size).loss for size in (1, 2, 16, 17)]
    assert evaluate(model, torch.as_tensor(ids), starts, sizes, batch_size=2).loss == losses[1]


def test_one_row_is_the_plain_mean():
    torch.manual_seed(0)
    model = RecurrentModel(12, cell="gru", hidden_size=16, num_layers=2, dropout=0.5).double()
    ids = torch.randint(12, (700,))
    logits, _ = model.eval()(ids[None, :-1], model.initial_state(1))
    expected = torch.nn.functional.cross_entropy(logits[0], ids[1:]).item()
    model.train()
    score = evaluate(model, ids, np.ones(12, dtype=bool), np.ones(12, dtype=int), batch_size=1, chunk=64)
    assert score.loss == pytest.approx(expected, rel=1e-12)
    assert model.training


MODELS = {
    "mixed": lambda: RecurrentModel(V, cell=["gru", "lstm", "mingru"], hidden_size=6),
    "dense": lambda: RecurrentModel(V, cell=["vanilla", "gru"], hidden_size=6, embedding_size=4, connections="dense"),
    "zoneout": lambda: RecurrentModel(V, cell="lstm", hidden_size=6, zoneout=0.2),
    "window": lambda: WindowModel(V, window=4, hidden_size=6),
}


def large(kind):
    """A model in float64 whose states matter."""
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model


def naive(model, ids, starts, breaks=()):
    """The sum of all losses, one symbol at a time, from the initial state again at every start."""
    model.eval()
    total, state = 0.0, model.initial_state(1)
    for place in range(len(ids) - 1):
        if place in starts or place in breaks:
            state = model.initial_state(1)
        with torch.no_grad():
            logits, state = model(torch.tensor([[int(ids[place])]]), state)
        total -= logits[0, 0].log_softmax(0)[int(ids[place + 1])].item()
    model.train()
    return total


@pytest.fixture(scope="module")
def records(real_text):
    """600 ids, and the starts of records of 1 to 30 of them."""
    ids = np.array([ord(c) % V for c in real_text[:600]], dtype=np.uint8)
    lengths = np.random.default_rng(1).integers(1, 31, 60)
    starts = np.concatenate([[0, 1], 1 + np.cumsum(lengths)])
    return ids, starts[starts < 600]


@pytest.mark.parametrize("kind", MODELS)
def test_records_are_scored_from_the_initial_state_whatever_batch_and_chunk(kind, records):
    ids, starts = records
    model = large(kind)
    expected = naive(model, ids, set(starts.tolist()))
    assert naive(model, ids, {0}) != pytest.approx(expected, rel=1e-4)
    for batch_size, warm_up, chunk in itertools.product((1, 2, 7, 16), (30, 37), (256, 64, 7, 1)):
        options = {"batch_size": batch_size, "warm_up": warm_up, "chunk": chunk}
        if chunk == 1 and batch_size < 7:
            continue
        score = evaluate(model, ids, STARTS, SIZES, **options, starts=starts)
        assert score.loss_sum == pytest.approx(expected, rel=1e-9), options
        assert score.characters == 599
    assert model.training


def test_without_warm_up_rows_begin_cold_and_records_too(records):
    ids, starts = records
    model = large("mixed")
    expected = naive(model, ids, set(starts.tolist()), breaks={200, 400})
    score = evaluate(model, ids, STARTS, SIZES, batch_size=3, warm_up=0, starts=starts)
    assert score.loss_sum == pytest.approx(expected, rel=1e-9)
    assert naive(model, ids, set(starts.tolist())) != pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_cold_windows_start_records_from_the_initial_state(kind, batch_size, records):
    ids, starts = records
    model = large(kind)
    expected = naive(model, ids, set(starts.tolist()), breaks=range(0, 600, 64))
    score = evaluate_cold(model, ids, STARTS, SIZES, window=64, batch_size=batch_size, starts=starts)
    assert score.loss_sum == pytest.approx(expected, rel=1e-9)
    assert evaluate_cold(model, ids, STARTS, SIZES, window=64).loss_sum != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("function", [evaluate, evaluate_cold])
@pytest.mark.parametrize("starts", [None, [], [0], [0, 599]])
def test_a_text_that_is_one_record_is_read_without_masks(function, starts, records):
    """Remembering takes none."""
    starts = None if starts is None else np.array(starts, dtype=np.int64)
    ids, _ = records
    assert function(Remembering(), ids, STARTS, SIZES, batch_size=2, starts=starts).characters == 599


@pytest.mark.parametrize("count", [2, 256, 257, 258, 513, 5000])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_cold_windows(count, batch_size):
    ids = np.random.default_rng(0).integers(0, V, count)
    model = Weighing()
    score = evaluate_cold(model, ids, STARTS, SIZES, batch_size=batch_size)
    assert score.characters == count - 1
    assert score.loss_sum == pytest.approx(ids[1:].sum() + (count - 1) * model.constant, rel=1e-6)
    windows = [row for tokens, counts in model.reads for row in zip(tokens, counts, strict=True)]
    assert [len(tokens) for tokens, _ in windows] == [min(256, count - 1 - s) for s in range(0, count - 1, 256)]
    assert all(counts[0] == 1 for _, counts in windows)
    assert torch.cat([tokens for tokens, _ in windows]).tolist() == ids[:-1].tolist()


def test_perplexity_of_an_uneven_last_batch():
    """Windows of 256 at one loss, a last one of 2 at another: weighted by characters, not by windows."""
    ids = np.array([0] * 257 + [1] * 2)
    model = Weighing(2)
    score = evaluate_cold(model, ids, np.ones(2, dtype=bool), np.ones(2, dtype=int))
    assert score.perplexity == pytest.approx(math.exp((256 * 0 + 2 * 1) / 258 + model.constant), rel=1e-6)


def test_characters_of_several_symbols_and_bytes():
    starts, sizes = np.array([True, False, True]), np.array([1, 1, 3])
    ids = np.array([0, 0, 1, 1, 2, 2, 0])
    score = evaluate(Remembering(3), ids, starts, sizes, batch_size=1)
    assert (score.characters, score.bytes) == (4, 10)
    assert score.loss_sum == pytest.approx(6 * math.log(3), rel=1e-6)
    assert score.loss == pytest.approx(1.5 * math.log(3), rel=1e-6)
    assert score.bits_per_byte == pytest.approx(0.6 * math.log2(3), rel=1e-6)


def test_figures_that_overflow_or_are_not_defined():
    assert Score(1e6, 1, 1).perplexity == math.inf
    assert math.isnan(Score(0.0, 0, 0).loss)
    assert math.isnan(Score(0.0, 0, 0).bits_per_byte)


@pytest.mark.parametrize("function", [evaluate, evaluate_cold])
@pytest.mark.parametrize("count", [0, 1])
def test_too_little_text_is_an_error(function, count):
    with pytest.raises(LmappError, match=f"{count} character"):
        function(Remembering(), np.zeros(count, dtype=int), STARTS, SIZES, batch_size=4)


class Guessing(torch.nn.Module):
    """An infill model that gives symbol y a loss of y nats more than symbol 0, and notes what it reads."""

    def __init__(self, symbols=V):
        super().__init__()
        self.symbols, self.mask_symbol, self.reads = symbols, symbols, []
        self.head = torch.nn.Linear(1, 1)

    def forward(self, tokens):
        assert not self.training
        assert not torch.is_grad_enabled()
        self.reads += tokens.tolist()
        return -torch.arange(float(self.symbols)).expand(*tokens.shape, -1)

    constant = Weighing.constant


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("fraction", [0.15, 1.0])
def test_masked_characters_are_scored_once_whatever_the_batch(count, batch_size, fraction):
    ids = np.random.default_rng(0).integers(0, V, count).astype(np.uint8)
    model = Guessing()
    arguments = {"mask_fraction": fraction, "window": 32, "batch_size": batch_size}
    score = evaluate_infill(model, ids, STARTS, SIZES, **arguments)
    assert score.characters == score.bytes == max(1, round(fraction * count))
    assert [len(row) for row in model.reads] == [min(32, count - start) for start in range(0, count, 32)]
    read = np.array([symbol for row in model.reads for symbol in row])
    masked = read == V
    assert masked.sum() == score.characters
    assert (read[~masked] == ids[~masked]).all()
    assert score.loss_sum == pytest.approx(ids[masked].sum() + score.characters * model.constant, rel=1e-6)
    # the mask is that of every other evaluation: another batch, another time, another network
    torch.rand(3)
    other = Guessing()
    assert evaluate_infill(other, torch.from_numpy(ids), STARTS, SIZES, **arguments | {"batch_size": 3}) == score
    assert other.reads == model.reads
    if count == 1000 and fraction < 1:
        evaluate_infill(third := Guessing(), ids, STARTS, SIZES, **arguments, seed=1)
        assert third.reads != model.reads


def test_a_masked_character_of_several_symbols_counts_once_across_windows_too():
    starts, sizes = np.array([True, False, True]), np.array([1, 1, 3])
    ids = np.array([0, 1, 1, 1, 2, 2])
    model = Guessing(3)
    score = evaluate_infill(model, ids, starts, sizes, mask_fraction=1.0, window=2, batch_size=2)
    assert (score.characters, score.bytes) == (3, 10)
    assert score.loss == pytest.approx((0 + 1 + 1 + 1 + 2 + 2 + 6 * model.constant) / 3, rel=1e-6)


def test_the_infill_loss_of_a_network_does_not_depend_on_the_batch_size(real_text):
    torch.manual_seed(0)
    model = InfillModel(V, cell="gru", hidden_size=16)
    ids = np.array([ord(c) % V for c in real_text[:3000]])
    losses = {
        evaluate_infill(model, ids, STARTS, SIZES, mask_fraction=0.15, window=64, batch_size=size).loss
        for size in (1, 7, 64)
    }
    assert max(losses) - min(losses) < 1e-6
    assert losses.pop() == pytest.approx(math.log(V), abs=0.5)
    assert model.training


def test_the_mask_depends_on_neither_batch_size_nor_window(monkeypatch):
    """It is drawn in pieces, whose ends lie where a character begins: of 2 to 4 symbols here, which go together."""
    monkeypatch.setattr(evaluation, "BLOCK", 100)
    starts, sizes = np.arange(V) % 3 != 1, np.ones(V, dtype=np.int64)
    rng = np.random.default_rng(0)
    ids = np.concatenate([[rng.integers(17) * 3, *[1] * rng.integers(1, 4)] for _ in range(800)]).astype(np.uint8)
    found = []
    for window, batch_size in ((32, 1), (32, 7), (1000, 2), (3, 5), (5000, 64)):
        model = Guessing()
        arguments = {"mask_fraction": 0.2, "window": window, "batch_size": batch_size}
        score = evaluate_infill(model, ids, starts, sizes, **arguments)
        read = np.array([symbol for row in model.reads for symbol in row])
        found.append((score.characters, (read == V).tolist()))
        assert score.loss_sum == pytest.approx(ids[read == V].sum() + (read == V).sum() * model.constant, rel=1e-6)
    assert all(part == found[0] for part in found)
    characters, masked = found[0]
    assert characters == pytest.approx(0.2 * 800, abs=len(ids) / 100)
    whole = np.split(np.array(masked), np.flatnonzero(starts[ids])[1:])
    assert len(whole) == 800
    assert all(symbols.all() or not symbols.any() for symbols in whole)
    assert sum(symbols.all() for symbols in whole) == characters
    # every piece has its share
    assert all(10 < sum(masked[start : start + 200]) < 70 for start in range(0, len(ids) - 200, 100))


def test_a_long_text_stays_where_it_is(tmp_path):
    """Of a million ids in a file no more than some pieces are in memory at once: all of them, widened, take 8 MB."""

    class Forgetting(Guessing):
        def forward(self, tokens):
            logits = super().forward(tokens)
            self.reads.clear()
            return logits

    path = tmp_path / "ids"
    np.memmap(path, dtype=np.uint8, mode="w+", shape=10**6)[:] = 1
    ids = np.memmap(path, dtype=np.uint8, mode="r")
    tracemalloc.start()
    try:
        ones = np.ones(2, dtype=bool)
        score = evaluate_infill(Forgetting(2), ids, ones, ones, mask_fraction=0.1, window=64, batch_size=64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert score.characters == pytest.approx(10**5, abs=16)
    assert peak < 3 * 2**20


def test_no_text_has_nothing_to_restore():
    with pytest.raises(LmappError, match="Nothing to restore"):
        evaluate_infill(Guessing(), np.zeros(0, dtype=int), STARTS, SIZES, mask_fraction=0.15, window=8)


def test_the_mode_is_restored_after_an_error():
    model = Remembering()
    model.forward = lambda *_: 1 / 0
    model.train()
    with pytest.raises(ZeroDivisionError):
        evaluate(model, np.zeros(600, dtype=int), STARTS, SIZES, batch_size=1)
    assert model.training
