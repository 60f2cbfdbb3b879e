import itertools

import numpy as np
import pytest
import torch

from lmapp.data.batches import RowBatches, fit_shape
from lmapp.errors import LmappError
from lmapp.vocabulary import Vocabulary

SHAPES = [
    (n, b, t)
    for n, b, t in itertools.product([2, 3, 5, 17, 64, 65, 66, 101], [1, 2, 3, 7, 16], [1, 2, 5, 8, 64])
    if n - 1 >= b
]


def loader(n, b, t, ids=None):
    # Distinct ids, so that an id is a place in the text.
    ids = np.arange(n, dtype=np.uint16) if ids is None else ids
    return RowBatches(ids, batch_size=b, sequence_length=t, starts_character=np.ones(n, dtype=bool))


def test_every_target_is_used_exactly_once():
    for n, b, t in SHAPES:
        batches = list(loader(n, b, t))
        targets = torch.cat([batch.targets.flatten() for batch in batches])
        assert sorted(targets[targets >= 0].tolist()) == list(range(1, n)), (n, b, t)
        assert sum(batch.characters for batch in batches) == n - 1


def test_a_target_follows_its_input_and_rows_continue():
    for n, b, t in SHAPES:
        batches = list(loader(n, b, t))
        for batch in batches:
            scored = batch.targets >= 0
            assert torch.equal(batch.targets[scored], batch.inputs[scored] + 1)
            assert (batch.inputs >= 0).all()
            assert (batch.inputs < n).all()
        for before, after in itertools.pairwise(batches):
            assert torch.equal(before.targets[:, -1], after.inputs[:, 0]), (n, b, t)
        rows = torch.cat([batch.targets for batch in batches], dim=1)
        lengths = (rows >= 0).sum(dim=1)
        q, r = divmod(n - 1, b)
        assert lengths.tolist() == [q + 1] * r + [q] * (b - r)


def test_only_the_last_batch_is_narrower_and_len_is_exact():
    for n, b, t in SHAPES:
        batches = list(loader(n, b, t))
        assert len(batches) == len(loader(n, b, t)) >= 1
        assert all(batch.inputs.shape == batch.targets.shape == (b, t) for batch in batches[:-1])
        assert batches[-1].inputs.shape == batches[-1].targets.shape
        assert 1 <= batches[-1].inputs.shape[1] <= t
        for batch in batches[:-1]:
            assert (batch.targets >= 0).all()
        assert (batches[-1].targets[:, :-1] >= 0).all()
        assert (batches[-1].targets[:, -1] >= 0).any()


def test_tensors_are_contiguous_int64():
    batch = next(iter(loader(101, 4, 8)))
    for tensor in (batch.inputs, batch.targets):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


def test_characters_counts_targets_that_start_one():
    text = "aé漢😀b" * 20
    vocabulary = Vocabulary("ab", byte_fallback=True)
    ids = vocabulary.encode(text).astype(np.uint16)
    for b, t in [(1, 1000), (3, 7), (8, 16)]:
        batches = RowBatches(ids, batch_size=b, sequence_length=t, starts_character=vocabulary.starts_character)
        for batch in batches:
            expected = sum(bool(vocabulary.starts_character[i]) for i in batch.targets.flatten().tolist() if i >= 0)
            assert batch.characters == expected
        assert sum(batch.characters for batch in batches) == len(text) - 1


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) and a.characters == b.characters
        for a, b in zip(one, other, strict=True)
    )


def test_resumed_iteration_equals_uninterrupted():
    for n, b, t in [(101, 3, 7), (64, 1, 64), (65, 7, 2)]:
        whole = list(loader(n, b, t))
        for stop in range(len(whole) + 1):
            first = loader(n, b, t)
            head = list(itertools.islice(first, stop))
            state = first.state_dict()
            assert state == {"batch": stop}
            second = loader(n, b, t)
            second.load_state_dict(state)
            assert second.state_dict() == state
            if stop < len(whole):
                assert same(head + list(second), whole), (n, b, t, stop)
                assert second.state_dict() == {"batch": len(whole)}
            assert same(list(second), whole)  # the next epoch, from its beginning


def test_a_position_survives_an_iterator_that_is_never_read():
    batches = loader(101, 3, 7)
    batches.load_state_dict({"batch": 2})
    iter(batches)
    assert batches.state_dict() == {"batch": 2}
    assert same(list(batches), list(loader(101, 3, 7))[2:])


def test_an_abandoned_epoch_does_not_move_the_next():
    batches = loader(101, 3, 7)
    list(itertools.islice(batches, 2))
    assert same(list(batches), list(loader(101, 3, 7)))


def test_an_epochs_end_as_position_starts_the_next_epoch():
    batches = loader(101, 3, 7)
    batches.load_state_dict({"batch": len(batches)})
    assert same(list(batches), list(loader(101, 3, 7)))


@pytest.mark.parametrize("position", [-1, 6])
def test_a_position_outside_an_epoch_is_refused(position):
    batches = loader(101, 3, 7)
    assert len(batches) == 5
    with pytest.raises(LmappError, match=f"{position}.* 5 batches"):
        batches.load_state_dict({"batch": position})


def test_a_memory_map_gives_the_same(tmp_path):
    ids = np.random.default_rng(0).integers(0, 65, 1000).astype(np.uint8)
    ids.tofile(tmp_path / "ids.bin")
    mapped = np.memmap(tmp_path / "ids.bin", dtype=np.uint8, mode="r")
    assert same(list(loader(1000, 5, 16, mapped)), list(loader(1000, 5, 16, ids)))


def test_too_few_symbols_for_the_rows():
    with pytest.raises(LmappError, match=r"--data.batch-size"):
        loader(4, 4, 8)
    assert len(loader(5, 4, 8)) == 1


@pytest.mark.parametrize(("b", "t"), [(0, 1), (1, 0)])
def test_shapes_are_positive(b, t):
    with pytest.raises(ValueError, match="at least 1"):
        loader(10, b, t)


def test_fit_shape_changes_as_little_as_it_can():
    for n, b, t in itertools.product(range(2, 60), [1, 2, 5, 32], [1, 3, 8, 64]):
        rows, window = fit_shape(n, b, t)
        assert 1 <= rows <= b
        assert 1 <= window <= t
        assert (n - 1) // rows >= window  # a full window in the shortest row
        assert len(loader(n, rows, window)) >= 1
        if window < t:
            assert rows == 1
            assert window == n - 1
        elif rows < b:
            assert (n - 1) // (rows + 1) < t
    assert fit_shape(1000, 32, 64) == (15, 64)
    assert fit_shape(65, 32, 64) == (1, 64)
    assert fit_shape(64, 32, 64) == (1, 63)
    assert fit_shape(2, 32, 64) == (1, 1)


@pytest.mark.parametrize("n", [0, 1])
def test_fit_shape_needs_two_symbols(n):
    with pytest.raises(ValueError, match="2"):
        fit_shape(n, 4, 4)
