import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from lmapp.errors import LmappError
from lmapp.vocabulary import UnknownCharacterError, Vocabulary, code_points

HOSTILE = [
    "",
    "plain text",
    "a\n\nb\r\nc\u2029d\r",
    "\x00\x00a\x00",
    "<0x0A><0x00><0xFF><unk><s></s><|endoftext|>",
    "👨‍👩‍👧‍👦 👍🏽 🇩🇪 e\u0301 é \u200d\ufe0f",
    "\ufeff\ufffe\uffff\U0010ffff\ue000",
    "漢字とかな 한국어 עברית عربى \u202e\u061c",
    "  double  spaces\t\v\f\x85\u2028 ▁ Ġ ##x",
]


def alphabet(*texts: str) -> str:
    return "".join(sorted(set("".join(texts))))


def vocabularies() -> list[Vocabulary]:
    whole = alphabet(*HOSTILE)
    return [
        Vocabulary(whole),
        Vocabulary(whole, byte_fallback=True),
        Vocabulary(alphabet("plain text <0x>"), byte_fallback=True),
        Vocabulary("", byte_fallback=True),
        Vocabulary("漢\U0010ffff", byte_fallback=True),
    ]


@pytest.mark.parametrize("vocabulary", vocabularies(), ids=lambda v: f"{len(v)}")
@pytest.mark.parametrize("text", HOSTILE)
def test_the_table_and_the_tokenizers_file_agree(vocabulary, text):
    ids = vocabulary.encode(text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    tokenizer = Tokenizer.from_str(vocabulary.to_json())
    assert tokenizer.get_vocab_size() == len(vocabulary)
    assert tokenizer.encode(text).ids == ids.tolist()
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=True) == text
    assert vocabulary.decode(ids) == text


def test_both_agree_on_real_text(real_text):
    vocabulary = Vocabulary(alphabet(real_text[:1000]), byte_fallback=True)
    text = real_text[:20_000] + "\u2026"
    assert vocabulary.tokenizer().encode(text).ids == vocabulary.encode(text).tolist()


def test_ids_follow_the_code_points_and_bytes_come_last():
    vocabulary = Vocabulary("ab", byte_fallback=True)
    assert len(vocabulary) == 258
    assert vocabulary.encode("ba").tolist() == [1, 0]
    assert vocabulary.encode("aéb").tolist() == [0, 2 + 0xC3, 2 + 0xA9, 1]


def test_a_text_that_spells_a_byte_symbol_is_six_characters():
    vocabulary = Vocabulary(alphabet("<0x0A>"), byte_fallback=True)
    assert vocabulary.encode("<0x0A>").tolist() == [vocabulary.characters.index(c) for c in "<0x0A>"]
    assert vocabulary.tokenizer().encode("<0x0A>").ids == vocabulary.encode("<0x0A>").tolist()


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("vocabulary", vocabularies(), ids=lambda v: f"{len(v)}")
def test_symbols_count_characters_and_bytes(vocabulary, text):
    ids = vocabulary.encode(text)
    assert vocabulary.starts_character.shape == vocabulary.symbol_bytes.shape == (len(vocabulary),)
    assert vocabulary.starts_character[ids].sum() == len(text)
    assert vocabulary.symbol_bytes[ids].sum() == len(text.encode())


def test_starts_character_is_false_for_the_64_continuation_bytes_only():
    starts = Vocabulary("abc", byte_fallback=True).starts_character
    assert np.flatnonzero(~starts).tolist() == list(range(3 + 0x80, 3 + 0xC0))
    assert Vocabulary("abc").starts_character.all()


@pytest.mark.parametrize(
    ("characters", "text", "character", "index"),
    [("ab", "abcab", "c", 2), ("ab", "ab😀", "😀", 2), ("b", "a", "a", 0), ("a", "aa\n", "\n", 2)],
)
def test_an_unknown_character_is_named_with_its_place(characters, text, character, index):
    with pytest.raises(UnknownCharacterError, match=f"U\\+{ord(character):04X}") as caught:
        Vocabulary(characters).encode(text)
    assert (caught.value.character, caught.value.index) == (character, index)
    assert isinstance(caught.value, LmappError)


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_a_lone_surrogate_is_an_error_of_ours(byte_fallback):
    with pytest.raises(UnknownCharacterError, match=r"position 2 .*surrogate") as caught:
        Vocabulary("ab", byte_fallback).encode("ab\ud800b")
    assert (caught.value.character, caught.value.index) == ("\ud800", 2)


def test_decode_replaces_invalid_bytes_and_keeps_the_rest():
    vocabulary = Vocabulary("ab", byte_fallback=True)
    euro = [2 + byte for byte in "€".encode()]
    assert vocabulary.decode([0, *euro, 1]) == "a€b"
    assert vocabulary.decode([*euro[:2], 1, *euro]) == "\ufffdb€"
    assert vocabulary.decode([euro[1], 0]) == "\ufffda"
    assert vocabulary.decode([]) == ""
    assert vocabulary.decode(np.array([1, 1], dtype=np.uint8)) == "bb"


@pytest.mark.parametrize("bad", [-1, 258])
def test_ids_outside_the_alphabet_are_refused(bad):
    vocabulary = Vocabulary("ab", byte_fallback=True)
    with pytest.raises(ValueError, match=r"0\.\.257"):
        vocabulary.decode([0, bad])
    with pytest.raises(ValueError, match=r"0\.\.257"):
        vocabulary.decoder().push(bad)


def test_the_incremental_decoder_equals_decode_on_any_ids():
    vocabulary = Vocabulary("ab漢", byte_fallback=True)
    random = np.random.default_rng(0)
    likely = np.concatenate([[0, 1, 2], 3 + np.frombuffer("é€😀".encode(), np.uint8)])
    for _ in range(300):
        ids = random.choice(likely, size=random.integers(0, 12))
        if random.random() < 0.3:
            ids = random.integers(0, len(vocabulary), size=8)
        decoder = vocabulary.decoder()
        assert "".join([decoder.push(i) for i in ids] + [decoder.flush()]) == vocabulary.decode(ids)


def test_the_incremental_decoder_waits_for_a_whole_character():
    vocabulary = Vocabulary("a", byte_fallback=True)
    decoder = vocabulary.decoder()
    assert [decoder.push(i) for i in vocabulary.encode("a😀a")] == ["a", "", "", "", "😀", "a"]
    assert decoder.flush() == ""
    decoder.push(vocabulary.encode("😀")[0])
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


@pytest.mark.parametrize("vocabulary", vocabularies(), ids=lambda v: f"{len(v)}")
def test_json_round_trip(vocabulary):
    again = Vocabulary.from_json(vocabulary.to_json())
    assert again == vocabulary
    assert again.characters == vocabulary.characters
    assert again != Vocabulary("z")
    assert hash(again) == hash(vocabulary)


def test_the_file_has_no_token_that_text_can_spell():
    document = json.loads(Vocabulary("ab", byte_fallback=True).to_json())
    assert document["added_tokens"] == []
    assert document["model"]["unk_token"] is None


def changed(**parts):
    document = json.loads(Vocabulary("ab", byte_fallback=True).to_json())
    for key, value in parts.items():
        if key in document["model"]:
            document["model"][key] = value
        else:
            document[key] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "null",
        "[]",
        "3",
        "{}",
        '{"model": null}',
        "[" * 100_000,
        changed(type="WordPiece"),
        changed(merges=[["a", "b"]]),
        changed(vocab={"a": 0}),
        changed(vocab=["a"]),
        changed(vocab={"a": 0, "b": 2}, byte_fallback=False),
        changed(vocab={"a": "x"}, byte_fallback=False),
        changed(vocab={"ab": 0}, byte_fallback=False),
        changed(vocab={"b": 0, "a": 1}, byte_fallback=False),
        changed(vocab={"\ud800": 0}, byte_fallback=False),
        changed(vocab={}, byte_fallback=False),
        changed(normalizer={"type": "Lowercase"}),
        changed(added_tokens=[{"id": 300, "content": "<s>"}]),
    ],
    ids=lambda text: text[:20],
)
def test_nonsense_is_no_vocabulary(text):
    with pytest.raises(LmappError, match="not a vocabulary file"):
        Vocabulary.from_json(text)


@pytest.mark.parametrize("characters", ["", "ba", "aa", "\ud800"])
def test_an_alphabet_is_sorted_distinct_and_not_empty(characters):
    with pytest.raises(ValueError, match="character"):
        Vocabulary(characters)


def test_code_points_of_everything():
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert code_points(text).tolist() == [ord(c) for c in text]


def test_importing_it_loads_neither_torch_nor_tokenizers():
    code = "import sys, lmapp.vocabulary, lmapp.data.sources, lmapp.data.encoded\n"
    code += "print([m for m in ('torch', 'tokenizers', 'datasets', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
