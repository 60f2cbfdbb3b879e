from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmapp.config import DataConfig
from lmapp.data.text import Reading, TextPolicy, as_byte_text, codec, decode, policy_of, shape
from lmapp.errors import LmappError, UsageError

SIZES = [1, 2, 3, 5, 7, 1 << 20]


def blocks(content: bytes, size: int) -> list[bytes]:
    return [content[place : place + size] for place in range(0, len(content), size)]


def decoded(content: bytes, size: int = 1 << 20, reading: Reading | None = None, **policy) -> str:
    pieces = list(decode(blocks(content, size), TextPolicy(**policy), "a.txt", reading or Reading()))
    assert all(pieces)
    return "".join(pieces)


def complaint(content: bytes, size: int = 1 << 20, **policy) -> list[str]:
    """The lines of the message that decoding ends in."""
    with pytest.raises(LmappError) as caught:
        decoded(content, size, **policy)
    lines = str(caught.value).split("\n")
    assert len(lines) <= 3
    return lines


def test_the_policy_of_a_configuration():
    assert policy_of(DataConfig()) == TextPolicy()
    config = DataConfig(encoding="cp1252", errors="skip", newlines="lf", normalization="nfkc", lowercase=True)
    assert policy_of(config) == TextPolicy("cp1252", "skip", "lf", "nfkc", True)
    assert policy_of(DataConfig(alphabet="bytes")) == TextPolicy(as_bytes=True)


def test_a_place_in_the_stream_is_named():
    reading = Reading(starts=[("a.txt", 0), ("b.zip: c", 5), ("d", 2000)])
    assert reading.locate(0) == "a.txt, character 0"
    assert reading.locate(4) == "a.txt, character 4"
    assert reading.locate(5) == "b.zip: c, character 0"
    assert reading.locate(1999) == "b.zip: c, character 1,994"
    assert reading.locate(9999) == "d, character 7,999"


# --- encodings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "one"), [("UTF8", "utf-8"), ("utf-8-sig", "utf-8"), ("latin1", "iso8859-1")])
def test_an_encoding_has_one_name(name, one):
    assert codec(name) == one


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("utf-9", "utf-?8|utf_8"),
        ("latn-1", "latin"),
        ("", "utf-8"),
        *((name, ".") for name in ("rot13", "hex", "x\0", "idna", "punycode", "unicode_escape", "undefined")),
    ],
)
def test_what_decodes_no_text_in_pieces_is_refused(name, hint):
    with pytest.raises(UsageError, match=rf"--data.encoding: (.|\n)*({hint})"):
        codec(name)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32", "latin-1", "gb18030", "utf-7", "shift_jis", "iso2022_jp"]
)
@pytest.mark.parametrize("size", SIZES)
def test_a_text_comes_back_as_it_is(encoding, size):
    content = "a\r\n\n\r漢字 é😀\x00ÿ\u2029".encode(encoding, "ignore")
    assert decoded(content, size, encoding=encoding) == content.decode(encoding)


def test_an_empty_file_is_an_empty_text():
    for encoding in ("utf-8", "utf-16", "iso2022_jp"):
        assert decoded(b"", encoding=encoding) == ""
    assert list(decode([b"", b"a", b"", b"b"], TextPolicy(), "a.txt", Reading())) == ["ab"]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_handed_on_as_they_are(size):
    content = b"\xef\xbb\xbf" + bytes(range(256)) + b"\r\n\xc3"
    policy = TextPolicy(encoding="nonsense", newlines="lf", normalization="nfkc", lowercase=True, as_bytes=True)
    reading = Reading()
    pieces = list(shape(decode(blocks(content, size), policy, "a.txt", reading), policy))
    assert all(pieces)
    assert "".join(pieces).encode("latin-1") == content
    assert reading == Reading()


def test_the_bytes_of_a_text():
    assert as_byte_text("aé€\r\n") == "a\xc3\xa9\xe2\x82\xac\r\n"
    assert TextPolicy(lowercase=True, as_bytes=True).apply("É") == "\xc3\x89"


# --- byte order marks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le", "gb18030"])
def test_one_mark_at_the_start_goes_and_is_counted(encoding, size):
    marked = "a\ufeff" if codec(encoding) in ("utf-16", "utf-32") or encoding == "utf-8-sig" else "\ufeffa\ufeff"
    reading = Reading()
    assert decoded(marked.encode(encoding), size, reading, encoding=encoding) == "a\ufeff"
    assert (reading.boms, reading.by_mark) == (1, {})
    assert decoded(("\ufeff" + marked).encode(encoding), size, reading, encoding=encoding) == "\ufeff" + "a\ufeff"
    assert reading.boms == 2


def test_a_file_without_a_mark_or_with_nothing_else():
    reading = Reading()
    assert decoded(b"\xef\xbb\xbf", reading=reading) == ""
    assert reading.boms == 1
    assert decoded(b"a\xef\xbb\xbf", reading=reading) == "a\ufeff"
    assert reading.boms == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_mark_is_believed_under_utf_8(encoding, size):
    reading = Reading()
    assert decoded("\ufeffx漢😀\r\n".encode(encoding), size, reading) == "x漢😀\r\n"
    assert decoded("\ufeff".encode(encoding), size, reading, encoding="utf-8-sig") == ""
    assert (reading.boms, reading.by_mark) == (2, {encoding[:6]: 2})


def test_a_mark_is_not_believed_against_a_named_encoding():
    assert decoded(b"\xff\xfe\0\0", encoding="utf-16") == "\0"
    assert decoded(b"\xff\xfea", encoding="cp1252") == "ÿþa"
    assert complaint("subtitle".encode("utf-16"), encoding="gb18030")[1].endswith("--data.encoding utf-16")


@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_utf_16_without_a_mark_lacks_its_byte_order(errors):
    lines = complaint("漢字".encode("utf-16-le"), encoding="utf-16", errors=errors)
    assert lines[0] == "a.txt does not start with a byte order mark, which utf-16 needs."
    assert "--data.encoding utf-16-le" in lines[1]


# --- what cannot be decoded ----------------------------------------------------------------------------------------


WRONG = [
    ("utf-8", b"caf\xe9 au lait", 3, "0xe9"),
    ("utf-8", "漢字".encode() + b"\xff", 6, "0xff"),
    ("utf-8", b"\x80", 0, "0x80"),
    ("utf-8", b"ab\xed\xa0\x80", 2, "0xed"),
    ("utf-8", b"x" * 20 + b"\xe2\x82(", 20, "0xe2 0x82"),
    ("utf-8", b"\xef\xbb\xbfab\xff", 5, "0xff"),
    ("utf-8-sig", b"\xef\xbb\xbfab\xff", 5, "0xff"),
    ("utf-16", b"\xff\xfea\0\0\xdcb\0", 4, "0x00 0xdc"),
    ("utf-32-be", b"\0\0\0a\0\x11\0\0", 4, "0x00 0x11 0x00 0x00"),
    ("cp1252", b"ab\x81", 2, "0x81"),
    ("gb18030", "漢字".encode("gb18030") + b"\x80a", 4, "0x80"),
    ("shift_jis", "漢字".encode("shift_jis") + b"\x81\xffa", 4, "0x81"),
    ("euc_kr", "한국".encode("euc_kr") + b"\xc9\xa1 ", 4, "0xc9"),
    ("iso2022_jp", "a漢字b".encode("iso2022_jp") + b"\xff", 12, "0xff"),
    ("utf-7", "漢字".encode("utf-7") + b"\xff", 8, "0xff"),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("encoding", "content", "offset", "wrong"), WRONG)
def test_undecodable_bytes_are_named_with_their_place(encoding, content, offset, wrong, size):
    first = complaint(content, size, encoding=encoding)[0]
    name = "utf-16-le" if encoding == "utf-16" else codec(encoding)
    assert first.startswith(f"a.txt, byte {offset}: {wrong} is not {name} (")
    assert first.endswith(", the encoding of its byte order mark." if encoding == "utf-16" else ").")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("encoding", "content", "place"),
    [
        ("utf-8", b"abc" + "€".encode()[:2], "byte 3: 0xe2 0x82"),
        ("utf-16-be", b"\0a\0", "byte 2: 0x00"),
        ("gbk", b"ab\x81", "byte 2: 0x81"),
        ("gb18030", b"ab\x81\x30\x81", "byte 2: 0x81 0x30 0x81"),
    ],
)
def test_a_file_cut_in_a_character_is_told_apart(encoding, content, place, size):
    lines = complaint(content, size, encoding=encoding)
    assert lines[0] == (
        f"a.txt, {place} only begins a character of {encoding}: the file is cut in the middle of a character."
    )
    assert "--data.encoding latin-1" in lines[1]
    assert decoded(content, size, encoding=encoding, errors="skip") == content.decode(encoding, "ignore")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("encoding", "content", "text", "places", "left_out"),
    [
        ("utf-8", b"a\xef\xbf\xbdb", "a\ufffdb", 0, 0),  # U+FFFD is a character like another
        ("utf-8", b"caf\xe9 au\xff\xfe \xe2\x82(\xe2\x82", "caf? au?? ?(?", 5, 7),
        ("utf-8", b"\xef\xbb\xbf\xff\xef\xbb\xbf", "?\ufeff", 1, 1),
        ("utf-16", b"\xfe\xff\0a\xdc\0\0b\xd8\0", "a?b?", 2, 4),
        ("cp1252", b"\x81a\x8d\x8d", "?a??", 3, 3),
        ("shift_jis", b"\x81\xff\x8a\xbfa\x8a", "??漢a?", 3, 3),
        ("gb18030", b"a\x80\xba\xba\x81\x30", "a?汉?", 2, 3),
        ("iso2022_jp", b"a\x1b$B4A\xff;z\x1b(Bb", "a漢?字b", 1, 1),
        ("utf-7", b"a+byJbVw-\xff", "a漢字?", 1, 1),
    ],
)
def test_undecodable_places_are_replaced_or_left_out_and_counted(encoding, content, text, places, left_out, size):
    reading = Reading()
    assert decoded(content, size, reading, encoding=encoding, errors="replace") == text.replace("?", "\ufffd")
    assert (reading.replaced, reading.skipped) == (places, 0)
    reading = Reading()
    assert decoded(content, size, reading, encoding=encoding, errors="skip") == text.replace("?", "")
    assert (reading.replaced, reading.skipped) == (0, left_out)


ENCODINGS = ["utf-8", "utf-16-le", "utf-32-be", "gb18030", "shift_jis", "euc_kr", "big5", "utf-7", "cp1252", "hz"]


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.sampled_from(ENCODINGS),
    st.lists(st.one_of(st.sampled_from("ab\n é漢字あ한😀Я~{+-"), st.binary(min_size=1, max_size=3)), max_size=12),
    st.data(),
)
def test_any_bytes_in_any_blocks(encoding, parts, data):
    content = b"".join(part.encode(encoding, "ignore") if isinstance(part, str) else part for part in parts)
    cut = data.draw(pieces_of(content))
    for errors in ("replace", "skip"):
        policy, readings, texts = TextPolicy(encoding, errors), [], []
        for given_blocks in (cut, [content]):
            readings.append(Reading())
            texts.append("".join(decode(given_blocks, policy, "a.txt", readings[-1])))
        assert texts[0] == texts[1]
        assert readings[0] == readings[1]
        if not readings[0].boms:
            assert texts[0] == content.decode(encoding, {"replace": "replace", "skip": "ignore"}[errors])


def pieces_of(whole: str | bytes) -> st.SearchStrategy:
    """Cuts of a whole into pieces, empty ones among them."""
    places = st.lists(st.integers(0, len(whole)), max_size=len(whole)).map(sorted)
    return places.map(lambda cut: [whole[i:j] for i, j in zip([0, *cut], [*cut, len(whole)], strict=True)])


# --- the likely encoding -------------------------------------------------------------------------------------------


FRENCH = "Le café était déjà fermé, où élèves et maîtres s’étaient réunis à Noël.\n"
POLISH = "Zażółć gęślą jaźń, powiedział wójt i poszedł spać późną nocą.\n"
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.\n"
CHINESE = "道可道，非常道。名可名，非常名。无名天地之始，有名万物之母。\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"


@pytest.mark.parametrize(
    ("content", "likely"),
    [
        (b"caf\xe9 au lait", "cp1252"),
        (FRENCH.encode("cp1252"), "cp1252"),
        (FRENCH.replace("’", "'").encode("latin-1"), "cp1252"),
        (FRENCH.encode("mac-roman"), "mac-roman"),
        (FRENCH.replace("’", "'").encode("cp850"), "cp850"),
        (b"It\x92s mine, don\x92t", "cp1252"),
        (b"He said \x93yes\x94 and \x91no\x92", "cp1252"),
        (POLISH.encode("cp1250"), "cp1250"),
        (RUSSIAN.encode("cp1251"), "cp1251"),
        (RUSSIAN.encode("koi8-r"), "koi8-r"),
        (CHINESE.encode("gb18030"), "gb18030"),
        (CHINESE.replace("无", "無").replace("万", "萬").encode("big5"), "big5"),
        (JAPANESE.encode("shift_jis"), "cp932"),
        ((JAPANESE * 30).encode("euc_jp"), "euc_jp"),
        ("모든 인간은 태어날 때부터 자유롭다.\n".encode("euc_kr"), "cp949"),
        (CHINESE.encode("utf-16-le"), "utf-16-le"),
        (("// " + CHINESE + "int main() { return 0; }\n").encode("gb18030"), "gb18030"),
    ],
)
@pytest.mark.parametrize("times", [1, 300])
def test_the_likely_encoding_is_named(content, likely, times):
    remedy, further = complaint(content * times)[1:]
    assert remedy.startswith(f"It looks like {likely}")
    assert remedy.endswith(f": --data.encoding {likely}")
    assert further == "To put U+FFFD in the place of such bytes: --data.errors replace"


@pytest.mark.parametrize("size", [5, 1000, 1 << 20])
def test_the_likely_encoding_far_into_a_file(size):
    lines = complaint(b"abc\n" * 50_000 + b"caf\xe9\n" + b"abc\n" * 50_000, size)
    assert lines[0].startswith("a.txt, byte 200003: 0xe9 is not utf-8")
    assert lines[1].endswith("--data.encoding cp1252")


@pytest.mark.parametrize("size", [4001, 1 << 20])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_guess_looks_at_whole_characters(shift, size):
    lines = ("é" * 30 + "\n") * 1000
    first, remedy, _ = complaint((lines + "a" * shift + "Á" + lines).encode(), size, encoding="cp1252")
    assert first.startswith(f"a.txt, byte {61_001 + shift}: 0x81 is not cp1252")
    assert remedy == "It looks like utf-8: --data.encoding utf-8"


@pytest.mark.parametrize("size", [1000, 1001])
def test_a_guess_looks_at_whole_characters_before_the_end_of_a_block(size):
    assert complaint((CHINESE * 100).encode("gb18030"), size)[1] == "It looks like gb18030: --data.encoding gb18030"


def test_a_guess_that_does_not_decode_is_none(monkeypatch):
    guess = SimpleNamespace(encoding="ascii", chaos=0.0, coherence=1.0)
    monkeypatch.setattr("charset_normalizer.from_bytes", lambda sample: [guess])
    assert complaint(RUSSIAN.encode("koi8-r"))[1].startswith("If it has another encoding, name it")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "shift_jis"])
def test_utf_8_is_recognised_under_another_encoding(encoding):
    for text in (JAPANESE + RUSSIAN, "à ŝ"):
        assert complaint(text.encode(), encoding=encoding)[1] == "It looks like utf-8: --data.encoding utf-8"


def test_damaged_utf_8_is_no_other_encoding():
    lines = complaint(FRENCH.encode() + b"caf\xe9\n" + FRENCH.encode())
    assert lines[1].startswith("The rest of what was read is utf-8")
    assert "--data.errors replace" in lines[2] and "skip" in lines[2]


@pytest.mark.parametrize("content", [b"\x80", b"ab\xed\xa0\x80", bytes(range(256)) * 9, b"words\0\xe9\1" * 9])
def test_what_resembles_no_text_gets_no_guess(content):
    assert complaint(content)[1] == (
        "If it has another encoding, name it: --data.encoding latin-1 (Western), cp1252, gb18030 …"
    )
    assert complaint(content, encoding="ascii")[1] == "Name the encoding that it has: --data.encoding utf-8"


# --- shape ---------------------------------------------------------------------------------------------------------


POLICIES = [
    TextPolicy(newlines=newlines, normalization=form, lowercase=lowercase)
    for newlines in ("keep", "lf")
    for form in ("none", "nfc", "nfkc")
    for lowercase in (False, True)
]

TROUBLE = [
    "\r\n \t1漢かｶ",
    "aeAÉéIıİŉǅﬁß",
    "\u0300\u0301\u0323\u0327\u0338\u0344\u0345\u3099\uff9e\uff9f",  # marks, and what begins with one when decomposed
    "\u1100\u1112\u1161\u1175\u11a8\u11c2가각힣ᄀ",  # Hangul: leading, vowel, final, syllables with and without a final
    "\u09c7\u09be\u09d7\u0b47\u0b3e\u0bc6\u0bbe\u1025\u102e\u1b05\u1b35\U00011347\U0001133e",  # starters that compose
    "\U0001d157\U0001d165\U0001d16e\U0001d15e\U0001d160",
    "ΣσςΑά'’.:\u00ad\u02b0\u037a\u1fbd^`",  # sigmas, and what they look past
    "👩\u200d👧\ufe0f🏽",
    "\ufffd\ufeff\u2126\u212b\ufdfa",
]


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.sampled_from(POLICIES), st.text(alphabet=sorted(set("".join(TROUBLE))), max_size=14), st.data())
def test_the_cuts_make_no_difference(policy, whole, data):
    for cut in (data.draw(pieces_of(whole)), list(whole)):
        pieces = list(shape(cut, policy))
        assert all(pieces)
        assert "".join(pieces) == policy.apply(whole)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "alphabet",
    [
        "\r\na",
        "ΣΑ' ",
        "Σσ\u0345\u02b0",
        "ΣA.漢",
        "e\u0301\u0323\u0344",
        "ᄀ\u1161\u11a8가",
        "\u09c7\u09be\u0301か\uff9e",
    ],
)
def test_all_short_texts(policy, alphabet):
    for whole in map("".join, product(alphabet, repeat=4)):
        assert "".join(shape(whole, policy)) == policy.apply(whole)


@pytest.mark.parametrize("form", ["nfc", "nfkc"])
def test_every_character_between_others(form):
    """No other character than the ones above is of a kind of its own."""
    policy = TextPolicy(newlines="lf", normalization=form, lowercase=True)
    points = [*range(0x3400), *range(0xA000, 0xAC20), *range(0xF900, 0x11A00), *range(0x1D000, 0x1E000)]
    for before, after in (("ΑΣ", "Σ'Α"), ("\u09c7", "\u0301"), ("e", "\u0323\u1161"), ("\u1100", "\u11a8")):
        whole = "\n".join(before + chr(point) + after for point in points)
        assert "".join(shape(whole, policy)) == policy.apply(whole)


def test_what_a_policy_does():
    assert TextPolicy().apply("\r\nE\u0301ﬁ") == "\r\nE\u0301ﬁ"
    assert TextPolicy(newlines="lf").apply("a\r\nb\rc\n\r\r\n\n") == "a\nb\nc\n\n\n\n"
    assert TextPolicy(normalization="nfc").apply("E\u0301ﬁ") == "Éﬁ"
    assert TextPolicy(normalization="nfkc").apply("E\u0301ﬁ") == "Éfi"
    assert TextPolicy(normalization="nfkc", lowercase=True).apply("ℌΑΣ ΣΑ") == "hας σα"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "unit", ["word, ", "ACGT", "ΑΣΑΣ", "Σ ", "Σ'Σ", "漢字かな", "e\u0301\u0323", "가", "ᄀ\u1161\u11a8"]
)
def test_little_waits_for_what_follows(policy, unit):
    """A stream is handed on as it comes, also where no white space divides it."""
    given_in = handed_on = 0

    def characters() -> Iterator[str]:
        nonlocal given_in
        for character in unit * 50:
            given_in += 1
            yield character

    for _ in shape(characters(), policy):
        assert given_in - handed_on <= 4
        handed_on = given_in
    assert handed_on == len(unit * 50)
