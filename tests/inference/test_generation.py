"""Writing text: how a character is drawn, how long a text gets, where it stops, and what a row depends on."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lmapp.cells import CELLS, find
from lmapp.errors import LmappError, UsageError
from lmapp.inference.generation import Sampling, generate, generate_samples, read_prompt
from lmapp.models import RecurrentModel, WindowModel
from lmapp.vocabulary import Vocabulary

ALPHABET = "\n abcdefghij"
GREEDY = Sampling(temperature=0)


def make_model(
    alphabet: str = ALPHABET, *, byte_fallback: bool = False, cell: str = "gru", layers: int = 1, **options: Any
) -> tuple[RecurrentModel, Vocabulary]:
    """An untrained network whose predictions are far from uniform and depend on what it has read."""
    vocabulary = Vocabulary("".join(sorted(alphabet)), byte_fallback)
    torch.manual_seed(12)
    if cell == "window":
        model: Any = WindowModel(len(vocabulary), window=5, hidden_size=12, **options)
    else:
        # Under a cell whose outputs are the logits there are others, as it can only be the top one.
        stack = [*["gru"] * (layers - 1), cell] if find(cell).reads_out else [cell] * layers
        model = RecurrentModel(len(vocabulary), cell=stack, hidden_size=12, **options)
    with torch.no_grad():
        if model.head is not None:
            model.head.weight.mul_(8)
    return model.eval(), vocabulary


class Place(NamedTuple):
    h: Tensor


class Scripted(nn.Module):
    """Says the same symbols whatever it reads; the state counts how many it has said."""

    def __init__(self, symbols: Sequence[int], size: int) -> None:
        super().__init__()
        self.symbols = [*symbols, 0]  # one more step may be asked for than is used
        self.size = size
        self.weight = nn.Parameter(torch.zeros(()))

    def initial_state(self, batch_size: int) -> tuple[Place]:
        return (Place(torch.zeros(batch_size, 1)),)

    def forward(self, tokens: Tensor, states: tuple[Place]) -> tuple[Tensor, tuple[Place]]:
        return self._logits(states[0]).unsqueeze(1), states

    def step(self, token: Tensor, states: tuple[Place]) -> tuple[Tensor, tuple[Place]]:
        place = Place(states[0].h + 1)
        return self._logits(place), (place,)

    def _logits(self, place: Place) -> Tensor:
        wanted = torch.tensor([self.symbols[int(said)] for said in place.h[:, 0]])
        return 100.0 * nn.functional.one_hot(wanted, self.size).float()


def say(
    vocabulary: Vocabulary, symbols: Sequence[int], length: int | None = None, stop: Sequence[str] = ()
) -> list[str]:
    """The pieces in which a model that says `symbols` writes."""
    model = Scripted(symbols, len(vocabulary))
    length = len(symbols) if length is None else length
    return list(generate(model, vocabulary, prompt="a", length=length, sampling=GREEDY, stop=stop))  # type: ignore[arg-type]


def naive_probabilities(logits: list[float], temperature: float, k: int | None, p: float | None) -> list[float]:
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    if k is not None:
        kth = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
        weights = [w if x >= kth else 0.0 for w, x in zip(weights, logits, strict=True)]
    probabilities = [w / sum(weights) for w in weights]
    if p is None:
        return probabilities
    kept, reached = set(), 0.0
    for i in sorted(range(len(logits)), key=lambda i: (-probabilities[i], i)):
        if reached >= p:
            break
        kept.add(i)
        reached += probabilities[i]
    left = [q if i in kept else 0.0 for i, q in enumerate(probabilities)]
    return [q / sum(left) for q in left]


def chi_square(counts: Counter[str], expected: dict[str, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= {key for key, p in expected.items() if p > 0}
    return sum((counts[key] - p * total) ** 2 / (p * total) for key, p in expected.items() if p > 0)


# How a character is drawn ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.0, 3.0])
@pytest.mark.parametrize("k", [None, 1, 3, 12, 1000])
@pytest.mark.parametrize("p", [None, 0.05, 0.5, 0.9, 1.0])
def test_probabilities_equal_their_naive_twin(temperature: float, k: int | None, p: float | None) -> None:
    logits = torch.randn(20, 12, generator=torch.Generator().manual_seed(1)) * 2
    found = Sampling(temperature, k, p).probabilities(logits)
    wanted = [naive_probabilities([float(x) for x in row], temperature, k, p) for row in logits]
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-12)


def test_top_k_keeps_what_is_as_likely_as_the_kth() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    assert Sampling(top_k=2).probabilities(logits)[0].count_nonzero() == 4
    assert Sampling(top_k=1).probabilities(logits)[0].tolist() == [0, 1, 0, 0, 0]


def test_top_k_beyond_the_alphabet_is_the_whole_alphabet() -> None:
    logits = torch.randn(3, 5)
    assert torch.equal(Sampling(top_k=10**6).probabilities(logits), Sampling().probabilities(logits))


def test_top_p_keeps_the_fewest_symbols_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    kept = {p: int(Sampling(top_p=p).probabilities(logits).count_nonzero()) for p in (1e-9, 0.4, 0.6, 0.8, 1.0)}
    assert kept == {1e-9: 1, 0.4: 1, 0.6: 2, 0.8: 3, 1.0: 4}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy_and_nothing_overflows(temperature: float) -> None:
    logits = torch.tensor([[-5.0, 40.0, 39.0], [-1.0, -2.0, -1.5]])
    found = Sampling(temperature).probabilities(logits)
    np.testing.assert_allclose(found.numpy(), [[0, 1, 0], [1, 0, 0]], atol=1e-12)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"top_k": 0}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.01}, "--top-p"),
        ({"top_p": float("nan")}, "--top-p"),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(options: dict[str, float], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Sampling(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5), Sampling(2.0, top_k=4), Sampling(top_p=0.7)])
def test_symbols_are_drawn_as_often_as_they_are_likely(sampling: Sampling) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(2))
    drawn = sampling.draw(logits.expand(20_000, -1), torch.Generator().manual_seed(3))
    counts = Counter(str(int(i)) for i in drawn)
    expected = {str(i): float(p) for i, p in enumerate(sampling.probabilities(logits))}
    assert chi_square(counts, expected) < 30  # 7 degrees of freedom: exceeded once in 10,000 seeds


def test_pairs_of_characters_are_written_as_often_as_the_forward_pass_says() -> None:
    model, vocabulary = make_model("abcd")
    sampling = Sampling(temperature=1.7)
    texts = generate_samples(
        model, vocabulary, samples=8000, prompt="abca", length=2, sampling=Sampling(temperature=1.7), seed=5
    )
    expected = {}
    for a, b in itertools.product("abcd", repeat=2):
        ids = torch.from_numpy(vocabulary.encode("abca" + a))[None]
        with torch.no_grad():
            logits, _ = model(ids, model.initial_state(1))
        after, last = sampling.probabilities(logits[0, -2:])
        expected[a + b] = float(after[vocabulary.encode(a)[0]] * last[vocabulary.encode(b)[0]])
    assert sum(expected.values()) == pytest.approx(1)
    assert chi_square(Counter(texts), expected) < 50  # 15 degrees of freedom


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", [*CELLS, "window"])
def test_greedy_text_is_the_argmax_of_the_forward_pass(cell: str, layers: int) -> None:
    model, vocabulary = make_model(cell=cell, layers=layers)
    prompt = "bad cab\n"
    text = "".join(generate(model, vocabulary, prompt=prompt, length=60, sampling=GREEDY))
    ids = torch.from_numpy(vocabulary.encode(prompt + text))
    with torch.no_grad():
        logits, _ = model(ids[None, :-1], model.initial_state(1))
    assert torch.equal(logits[0, len(prompt) - 1 :].argmax(-1), ids[len(prompt) :])
    assert len(set(text)) > 1


@pytest.mark.parametrize("embedding_size", [0, 5])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", [*CELLS, "window"])
def test_steps_predict_what_the_forward_pass_predicts(cell: str, layers: int, embedding_size: int) -> None:
    model, vocabulary = make_model(cell=cell, layers=layers, embedding_size=embedding_size)
    tokens = torch.randint(len(vocabulary), (3, 50), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits, last = model(tokens, model.initial_state(3))
        states = model.initial_state(3)
        for t in range(tokens.shape[1]):
            stepped, states = model.step(tokens[:, t], states)
            assert (stepped.softmax(-1) - logits[:, t].softmax(-1)).abs().max() < 1e-5
    for a, b in zip(states, last, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x - y).abs().max() < 1e-5


def test_what_is_read_of_a_prompt_is_what_stepping_through_it_leaves() -> None:
    model, vocabulary = make_model(cell="lstm", layers=2)
    ids = [int(i) for i in vocabulary.encode("a big head")]
    with torch.no_grad():
        logits, states = read_prompt(model, vocabulary, ids, 3)
        walked = model.initial_state(3)
        for i in ids:
            stepped, walked = model.step(torch.tensor([i] * 3), walked)
    torch.testing.assert_close(logits, stepped, atol=1e-5, rtol=0)
    for a, b in zip(states, walked, strict=True):
        torch.testing.assert_close(tuple(a), tuple(b), atol=1e-5, rtol=0)


# Seeds and rows -------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    model, vocabulary = make_model()
    before = torch.get_rng_state()
    texts = ["".join(generate(model, vocabulary, length=80, seed=seed)) for seed in (1, 1, 2, -5, 2**64 - 1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_beyond_64_bits_is_refused() -> None:
    model, vocabulary = make_model()
    with pytest.raises(UsageError, match="--seed"):
        generate(model, vocabulary, seed=2**64)


def test_pieces_joined_are_the_text() -> None:
    model, vocabulary = make_model(byte_fallback=True)
    for seed in range(5):
        pieces = list(generate(model, vocabulary, prompt="bad", length=70, stop=["ab", "c\n"], seed=seed))
        assert all(pieces)
        assert ["".join(pieces)] == generate_samples(
            model, vocabulary, samples=1, prompt="bad", length=70, stop=["ab", "c\n"], seed=seed
        )


def test_a_row_of_several_follows_from_its_own_text_alone() -> None:
    model, vocabulary = make_model(cell="lstm", layers=2)
    prompt, top = "cab ", 3
    texts = generate_samples(
        model, vocabulary, samples=6, prompt=prompt, length=50, sampling=Sampling(top_k=top), seed=3
    )
    assert len(set(texts)) == 6
    for text in texts:
        ids = torch.from_numpy(vocabulary.encode(prompt + text))
        with torch.no_grad():
            logits, _ = model(ids[None, :-1], model.initial_state(1))
        likeliest = logits[0, len(prompt) - 1 :].topk(top).indices
        assert (likeliest == ids[len(prompt) :, None]).any(-1).all()


def test_a_row_that_has_stopped_changes_no_other_row() -> None:
    model, vocabulary = make_model()
    whole = generate_samples(model, vocabulary, samples=8, prompt="a", length=60, seed=4)
    stopped = generate_samples(model, vocabulary, samples=8, prompt="a", length=60, stop=["b"], seed=4)
    assert stopped == [text.split("b")[0] for text in whole]
    assert len({len(text) for text in stopped}) > 3


def test_greedy_rows_are_all_the_single_greedy_text() -> None:
    model, vocabulary = make_model()
    alone = "".join(generate(model, vocabulary, prompt="dad", length=40, sampling=GREEDY))
    assert generate_samples(model, vocabulary, samples=3, prompt="dad", length=40, sampling=GREEDY) == [alone] * 3


# Prompts --------------------------------------------------------------------------------------------------------------


def test_without_a_prompt_the_text_begins_as_after_a_line_break() -> None:
    model, vocabulary = make_model()
    for sampling in (GREEDY, Sampling()):
        texts = ["".join(generate(model, vocabulary, prompt=p, length=40, sampling=sampling)) for p in ("", "\n")]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_without_a_prompt_or_a_line_break_any_character_begins(byte_fallback: bool) -> None:
    model, vocabulary = make_model("abcd", byte_fallback=byte_fallback)
    first = generate_samples(model, vocabulary, samples=4000, length=1)
    assert chi_square(Counter(first), dict.fromkeys("abcd", 0.25)) < 30
    text = "".join(generate(model, vocabulary, length=30, sampling=GREEDY))
    rest = "".join(generate(model, vocabulary, prompt=text[0], length=29, sampling=GREEDY))
    assert text == text[0] + rest


def test_a_prompt_with_an_unknown_character_is_refused_at_once_and_names_it() -> None:
    model, vocabulary = make_model()
    with pytest.raises(UsageError) as caught:
        generate(model, vocabulary, prompt="abcé")
    assert "character 4" in str(caught.value)
    assert "é" in str(caught.value)
    assert "--data.byte-fallback" in str(caught.value)


def test_half_a_character_in_a_prompt_is_called_that() -> None:
    model, vocabulary = make_model(byte_fallback=True)
    with pytest.raises(UsageError, match=r"character 2, U\+DCE9, is a lone surrogate"):
        generate(model, vocabulary, prompt="a\udce9")


def test_with_byte_fallback_any_prompt_is_read() -> None:
    model, vocabulary = make_model(byte_fallback=True)
    assert len("".join(generate(model, vocabulary, prompt="é → 😀", length=20))) == 20


# Length ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 33])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_length_counts_new_characters(byte_fallback: bool, length: int) -> None:
    model, vocabulary = make_model(byte_fallback=byte_fallback)
    for seed in range(3):
        assert len("".join(generate(model, vocabulary, prompt="a big head", length=length, seed=seed))) == length
    assert [len(t) for t in generate_samples(model, vocabulary, samples=4, length=length)] == [length] * 4


def test_a_negative_length_is_refused() -> None:
    model, vocabulary = make_model()
    with pytest.raises(UsageError, match="--length"):
        generate(model, vocabulary, length=-1)


def test_bytes_become_characters_and_broken_ones_the_replacement_character() -> None:
    vocabulary = Vocabulary("ab", byte_fallback=True)
    said = [0, *[2 + byte for byte in "é😀".encode()], 1, 2 + 0xE2, 2 + 0x82, 0, 2 + 0xFF, 2 + 0x80, *[2 + 0xC3] * 3, 1]
    text = "aé😀b\ufffda\ufffd\ufffd\ufffd\ufffd\ufffdb"
    assert vocabulary.decode(said) == text
    for length in range(len(text) + 1):
        pieces = say(vocabulary, said, length)
        assert "".join(pieces) == text[:length]
        assert all(pieces)
    assert say(vocabulary, said, len(text))[:3] == ["a", "é", "😀"]


# Stop strings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stop",
    [
        ["aab"],
        ["aa"],
        ["abab"],
        ["b"],
        ["ab", "abb"],
        ["aab", "ab"],
        ["ba", "abaa"],
        ["bb", "aaaa", "abab"],
        ["bbbbbbbbbbbbbbbb"],
        [""],
        ["", "aba"],
        [],
    ],
)
def test_the_text_ends_where_the_first_stop_string_is_complete(stop: list[str]) -> None:
    vocabulary = Vocabulary("ab")
    for letters in itertools.product("ab", repeat=7):
        full = "".join(letters)
        pieces = say(vocabulary, [int(i) for i in vocabulary.encode(full)], stop=stop)
        text = "".join(pieces)
        assert all(pieces)
        assert full.startswith(text)
        assert not any(s in text for s in stop if s)
        if any(s in full for s in stop if s):
            followed = [s for s in stop if s and full.startswith(text + s)]
            assert any(not any(s in (text + f)[:-1] for s in stop if s) for f in followed), (full, text)
        else:
            assert text == full


def test_a_self_overlapping_stop_string_is_found() -> None:
    vocabulary = Vocabulary("ab")
    assert "".join(say(vocabulary, [0, 0, 0, 1, 1], stop=["aab"])) == "a"


def test_of_two_stop_strings_that_end_together_none_leaves_its_beginning() -> None:
    vocabulary = Vocabulary("abc")
    for stop in (["ab", "aab"], ["aab", "ab", "b"]):
        assert "".join(say(vocabulary, [2, 0, 0, 1, 2], stop=stop)) == "c"


def test_what_might_begin_a_stop_string_waits_until_it_does_not() -> None:
    vocabulary = Vocabulary("abc")
    assert say(vocabulary, [2, 0, 0, 2, 0, 0, 1, 2], stop=["aab"]) == ["c", "aac"]
    assert say(vocabulary, [2, 0, 0], stop=["aab"]) == ["c", "aa"]


def test_one_stop_string_may_be_given_as_itself() -> None:
    vocabulary = Vocabulary("abc")
    assert "".join(say(vocabulary, [0, 1, 0, 2, 1], stop="ac")) == "ab"


def test_stop_strings_of_replacement_characters_end_the_text_in_the_middle_of_a_symbol() -> None:
    vocabulary = Vocabulary("ab", byte_fallback=True)
    said = [0, 2 + 0xC3, 1, 1]  # the b completes the broken sequence before it, too
    assert "".join(say(vocabulary, said, 4)) == "a\ufffdbb"
    assert "".join(say(vocabulary, said, 4, stop=["\ufffd", "a\ufffdb"])) == "a"
    assert "".join(say(vocabulary, said, 4, stop=["a\ufffdb"])) == ""


def test_stop_string_in_the_prompt_does_not_count() -> None:
    vocabulary = Vocabulary("ab")
    model = Scripted([1, 1, 0], 2)
    text = "".join(generate(model, vocabulary, prompt="aba", length=3, sampling=GREEDY, stop=["ab"]))  # type: ignore[arg-type]
    assert text == "bba"


# What writing leaves behind -------------------------------------------------------------------------------------------


def test_the_mode_of_the_model_is_restored_and_dropout_is_off_meanwhile() -> None:
    model, vocabulary = make_model(dropout=0.5, layers=2)
    quiet = [list(generate(model, vocabulary, prompt="a big head", length=40, seed=seed)) for seed in range(5)]
    model.train()
    assert [list(generate(model, vocabulary, prompt="a big head", length=40, seed=seed)) for seed in range(5)] == quiet
    assert model.training
    begun = generate(model, vocabulary, length=40)
    next(begun)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    begun.close()  # type: ignore[attr-defined]
    assert model.training
    model.eval()
    list(generate(model, vocabulary, length=3))
    assert not model.training


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_a_network_that_is_not_finite_says_so(sampling: Sampling) -> None:
    model, vocabulary = make_model()
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    model.train()
    with pytest.raises(LmappError, match="not finite"):
        list(generate(model, vocabulary, length=5, sampling=sampling))
    assert model.training


def test_a_state_that_overflows_while_writing_is_an_error_not_a_crash() -> None:
    model, vocabulary = make_model(cell="vanilla", activation="identity")
    with torch.no_grad():
        model.layers[0].weight_hh.copy_(torch.eye(12) * 10)  # type: ignore[union-attr, operator]
    with pytest.raises(LmappError, match="not finite"):
        list(generate(model, vocabulary, length=200))
