import itertools
import tracemalloc

import numpy as np
import pytest
import torch

from lmapp.data.batches import RowBatches, fit_shape
from lmapp.errors import LmappError
from lmapp.resets import keep_mask
from lmapp.vocabulary import Vocabulary

SHAPES = [
    (n, b, t)
    for n, b, t in itertools.product([2, 3, 5, 17, 64, 65, 66, 101], [1, 2, 3, 7, 16], [1, 2, 5, 8, 64])
    if n - 1 >= b
]


def loader(n, b, t, ids=None, **options):
    # Distinct ids, so that an id is a place in the text.
    ids = np.arange(n, dtype=np.uint16) if ids is None else ids
    return RowBatches(ids, batch_size=b, sequence_length=t, starts_character=np.ones(n, dtype=bool), **options)


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
            assert state == {"epoch": 0, "batch": stop}
            second = loader(n, b, t)
            second.load_state_dict(state)
            assert second.state_dict() == state
            if stop < len(whole):
                assert same(head + list(second), whole), (n, b, t, stop)
                assert second.state_dict() == {"epoch": 0, "batch": len(whole)}
            assert same(list(second), whole)  # the next epoch, from its beginning


def test_a_position_survives_an_iterator_that_is_never_read():
    batches = loader(101, 3, 7)
    batches.load_state_dict({"epoch": 1, "batch": 2})
    iter(batches)
    assert batches.state_dict() == {"epoch": 1, "batch": 2}
    assert same(list(batches), list(loader(101, 3, 7))[2:])


def test_an_abandoned_epoch_does_not_move_the_next():
    batches = loader(101, 3, 7)
    list(itertools.islice(batches, 2))
    assert same(list(batches), list(loader(101, 3, 7)))
    assert batches.state_dict() == {"epoch": 0, "batch": 5}


def test_an_epochs_end_as_position_starts_the_next_epoch():
    batches = loader(101, 3, 7)
    batches.load_state_dict({"epoch": 0, "batch": len(batches)})
    assert same(list(batches), list(loader(101, 3, 7)))


@pytest.mark.parametrize("position", [-1, 6])
def test_a_position_outside_an_epoch_is_refused(position):
    batches = loader(101, 3, 7)
    assert len(batches) == 5
    with pytest.raises(LmappError, match=f"{position}.* 5 batches"):
        batches.load_state_dict({"epoch": 0, "batch": position})


def test_a_memory_map_gives_the_same(tmp_path):
    ids = np.random.default_rng(0).integers(0, 65, 1000).astype(np.uint8)
    ids.tofile(tmp_path / "ids.bin")
    mapped = np.memmap(tmp_path / "ids.bin", dtype=np.uint8, mode="r")
    assert same(list(loader(1000, 5, 16, mapped)), list(loader(1000, 5, 16, ids)))


# Records --------------------------------------------------------------------------------------------------------------


def test_keep_is_0_exactly_where_an_input_begins_a_record():
    rng = np.random.default_rng(0)
    found = 0
    for n, b, t in SHAPES:
        for share in (0.05, 0.4, 1.0):
            starts = np.flatnonzero(rng.random(n) < share)
            batches = loader(n, b, t, starts=starts)
            assert batches.resets == bool(set(starts.tolist()) & set(range(1, n - 1)))
            for batch in batches:
                if not batches.resets:
                    assert batch.keep is None
                    continue
                assert batch.keep.dtype == torch.float32
                expected = ~np.isin(batch.inputs.numpy(), starts)
                assert batch.keep.tolist() == expected.tolist(), (n, b, t, starts)
                found += int((~expected).sum())
    assert found > 1000


@pytest.mark.parametrize("starts", [None, [], [0], [100], [0, 100]])
def test_without_a_record_that_begins_inside_the_text_nothing_is_reset(starts):
    starts = None if starts is None else np.array(starts, dtype=np.int64)
    batches = loader(101, 3, 7, starts=starts)
    assert not batches.resets
    assert all(batch.keep is None for batch in batches)


def test_a_single_symbol_can_be_a_record():
    keep = keep_mask(np.array([0, 3, 4, 5, 9]), np.array([0, 3, 6, 10]), 3)
    assert keep.tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]]


def test_starts_of_a_million_records_stay_where_they_are(tmp_path):
    np.arange(0, 3 * 10**6, 3, dtype=np.int64).tofile(tmp_path / "starts.bin")
    starts = np.memmap(tmp_path / "starts.bin", dtype=np.int64, mode="r")
    ids = np.zeros(3 * 10**6, dtype=np.uint8)
    tracemalloc.start()
    try:
        batches = RowBatches(
            ids, batch_size=4, sequence_length=60, starts_character=np.ones(1, dtype=bool), starts=starts
        )
        kept = [batches.batch(index).keep.sum().item() for index in (0, 5000, len(batches) - 1)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept[:2] == [160, 160]
    assert peak < 2**17


# Epochs cut elsewhere -------------------------------------------------------------------------------------------------


def test_shifted_epochs_use_every_target_exactly_once_in_equally_many_batches():
    for n, b, t in SHAPES:
        batches, plain = loader(n, b, t, shift=True), loader(n, b, t)
        assert len(plain) <= len(batches) <= len(plain) + 1
        for _ in range(3):
            epoch = list(batches)
            assert len(epoch) == len(batches), (n, b, t)
            targets = torch.cat([batch.targets.flatten() for batch in epoch])
            assert sorted(targets[targets >= 0].tolist()) == list(range(1, n)), (n, b, t)
            assert sum(batch.characters for batch in epoch) == n - 1
            assert [batch.inputs.shape for batch in epoch[1:-1]] == [(b, t)] * (len(epoch) - 2)
            assert all(1 <= batch.inputs.shape[1] <= t for batch in epoch)
            for before, after in itertools.pairwise(epoch):
                assert torch.equal(before.targets[:, -1], after.inputs[:, 0]), (n, b, t)


def test_shifted_epochs_begin_with_at_least_half_of_all_widths_in_turn():
    for longest, t in itertools.product(range(1, 80), [1, 2, 3, 8, 9, 16]):
        batches = loader(longest + 1, 1, t, shift=True)
        firsts = [batches.batch(0, epoch).inputs.shape[1] for epoch in range(2 * t)]
        count = len(set(firsts))
        assert count >= t / 2 if longest > t else count == 1, (longest, t)
        assert all(len(set(part)) == count for part in (firsts[:count], firsts[count : 2 * count]))


def endless(batches):
    while True:
        yield from batches


def test_every_target_has_half_a_window_before_it_in_some_epoch():
    for longest, t in [(64, 8), (65, 8), (68, 8), (69, 8), (71, 8), (70, 9), (9, 8), (16, 8)]:
        batches = loader(longest + 1, 1, t, shift=True)
        most = np.zeros(longest, dtype=int)
        for batch in itertools.islice(endless(batches), 16 * len(batches)):
            places = batch.inputs[0].numpy()
            most[places] = np.maximum(most[places], 1 + np.arange(len(places)))
        plain = np.arange(longest) % t + 1
        assert (most >= np.minimum(np.arange(longest) + 1, t / 2)).all(), (longest, t)
        assert (most >= t / 2).sum() > (plain >= t / 2).sum()


def test_keep_of_a_shifted_epoch():
    starts = np.array([0, 7, 8, 30, 55, 90])
    batches = loader(101, 3, 7, starts=starts, shift=True)
    for _ in range(4):
        for batch in batches:
            assert batch.keep.tolist() == (~np.isin(batch.inputs.numpy(), starts)).tolist()


@pytest.mark.parametrize(("n", "b", "t"), [(101, 3, 7), (65, 7, 3), (90, 1, 8), (128, 1, 64)])
def test_shifted_epochs_go_on_exactly_after_any_number_of_stops(n, b, t):
    whole = list(itertools.islice(endless(loader(n, b, t, shift=True)), 60))
    assert same(whole, list(itertools.islice(endless(loader(n, b, t, shift=True)), 60)))
    widths = {batch.inputs.shape[1] for batch in whole[:: len(loader(n, b, t, shift=True))]}
    assert len(widths) > 1
    rng = np.random.default_rng(0)
    for _ in range(10):
        found, state = [], {"epoch": 0, "batch": 0}
        while len(found) < 60:
            batches = loader(n, b, t, shift=True)
            batches.load_state_dict(state)
            found += itertools.islice(endless(batches), int(min(rng.integers(1, 20), 60 - len(found))))
            state = batches.state_dict()
        assert same(found, whole)


def test_a_shifted_window_is_not_the_whole_row():
    with pytest.raises(ValueError, match="whole row"):
        loader(101, 3, None, shift=True)


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
