"""Bytes become text as the Encoding Standard says: its labels, its tables, its errors."""

import hashlib

from data_pipeline.sources.charsets import charset_of, decoded
from tests.support.reading import encodings
from tests.support.tables import each

ENCODINGS = encodings()


def text_of(sequence: bytes, label: str) -> str:
    charset = charset_of(label)
    assert charset
    return decoded(sequence, charset)[0]


def test_the_228_labels_of_the_standard_are_known_in_any_case_and_no_others():
    labels = {label: row["name"] for row in ENCODINGS for label in row["labels"].split()}
    assert len(labels) == 228
    for label, name in labels.items():
        assert charset_of(label) == charset_of(f"\t{label.upper()} \n") == charset_of(name) is not None
    for unknown in ("", "utf-7", "utf-32", "base64", "cp949", "johab", "iso-8859-12", "viscii", "idna", "ibm852"):
        assert charset_of(unknown) is None


def pair(at: int, trails: int, gap: int) -> bytes:
    """The bytes at a place of a table with this many second bytes a row, from 0x40 and, after a gap, from `gap`."""
    row, place = divmod(at, trails)
    return bytes([0x81 + row, place + 0x40 if place < 63 else place - 63 + gap])


def shift_jis(at: int) -> bytes:
    lead, second = pair(at, 188, 0x80)
    return bytes([lead + (0x40 if lead > 0x9F else 0), second])


INDEXES = {  # how long an index is, and the bytes at each of its pointers
    "big5": (19_782, lambda at: pair(at, 157, 0xA1)),
    "gbk": (23_940, lambda at: pair(at, 190, 0x80)),
    "gb18030": (23_940, lambda at: pair(at, 190, 0x80)),
    "shift_jis": (11_280, shift_jis),
    "euc-kr": (23_940, lambda at: bytes([at // 190 + 0x81, at % 190 + 0x41])),
    "euc-jp": (8_836, lambda at: bytes([0x8F, at // 94 + 0xA1, at % 94 + 0xA1])),
}


@each("row", [row for row in ENCODINGS if row["identifier"] != "-"])
def test_the_characters_of_an_index_are_the_standards(row):
    """The standard's index lacks the users' rows of Shift_JIS, and Big5's sequences of two characters."""
    length, sequence_at = INDEXES.get(row["name"], (128, lambda at: bytes([at + 128])))
    texts = [text_of(sequence_at(at), row["name"]) for at in range(length)]
    lacking = {"\ufffd", *(map(chr, range(0xE000, 0xE758)) if row["name"] == "shift_jis" else ())}
    points = [ord(text) if len(text) == 1 and text not in lacking else None for text in texts]
    assert hashlib.sha256(str(points).encode()).hexdigest() == row["identifier"]
    known = [at for at in range(length) if points[at] is not None]
    assert text_of(b"".join(map(sequence_at, known)), row["name"]) == "".join(texts[at] for at in known)


def test_euc_jp_has_the_rows_of_nec_and_ibm_that_shift_jis_has():
    for at in range(8_836):
        character = text_of(shift_jis(at), "shift_jis")[0]  # ASCII follows an error
        assert text_of(bytes([at // 94 + 0xA1, at % 94 + 0xA1]), "euc-jp") == character


@each(
    "label, sequence, text",
    [
        # two characters for one sequence, a half-width one, the user's own rows, a euro, four bytes
        ("big5", "8862 8864 88a3 88a5", "Ê̄Ê̌ê̄ê̌"),
        ("euc-jp", "8eb1 8fa2b7 a1c1", "ｱ～～"),
        ("shift_jis", "b1 80 f040 f9fc", "ｱ\x80\ue000\ue757"),
        ("gbk", "80 81308130 8135f437 8431a439 90308130 e3329a35", "€\x80\ue7c7\uffff\U00010000\U0010ffff"),
        # what belongs to no character: the first byte alone where ASCII follows it
        ("shift_jis", "81 20 82 0a 81ff 82a0 a0 fd 85", "\ufffd \ufffd\n\ufffdあ\ufffd\ufffd\ufffd"),
        ("euc-kr", "ff b0a1 81ff b0a1 81 30 80 b0", "\ufffd가\ufffd가\ufffd0\ufffd\ufffd"),
        ("euc-jp", "8f20 8fa120 8fa180 a4a2 8ee0 80 a920 a9", "\ufffd \ufffd \ufffdあ\ufffd\ufffd\ufffd \ufffd"),
        ("big5", "8140 a4a4 81a1 a47f ff a4", "\ufffd@中\ufffd\ufffd\x7f\ufffd\ufffd"),
        ("gb18030", "8131 d6d0 813081 20 8431a530 e3329a36 ff d6", "\ufffd1中\ufffd0\ufffd \ufffd\ufffd\ufffd\ufffd"),
        ("windows-1252", "80 81 8d 8f 90 9d ff", "€\x81\x8d\x8f\x90\x9dÿ"),
        ("windows-1255", "81 ca d9 fb ff", "\x81\u05ba\ufffd\ufffd\ufffd"),
        ("utf-8", "c3a9 e282 41 f09f98 ff ed a080", "é\ufffdA\ufffd\ufffd\ufffd\ufffd\ufffd"),
        ("utf-16", "4100 00d8 4200 00dc 3dd800de 00", "A\ufffdB\ufffd😀\ufffd"),
        ("unicodefffe", "0041 d83dde00 dc00", "A😀\ufffd"),
        ("x-user-defined", "41 80 ff", "A\uf780\uf7ff"),
        *(
            (label, "41 1b2429 43 0e", "\ufffd")
            for label in ("iso-2022-kr", "hz-gb-2312", "iso-2022-cn", "replacement")
        ),
        ("replacement", "", ""),
        # ISO-2022-JP: four sets; nothing between two escapes, and no escape, are errors
        ("iso-2022-jp", "41 1b2442 2422 2d21 1b2842 42", "Aあ①B"),
        ("iso-2022-jp", "1b284a 5c7e41 1b2849 315f60 1b2440 2422 1b2842 5c", "¥‾Aｱﾟ\ufffdあ\\"),
        ("iso-2022-jp", "1b2442 1b2842 41 1b2442 24 1b2842 41", "\ufffdA\ufffdA"),
        (
            "iso-2022-jp",
            "1b 41 1b2843 80 0e 1b2442 2422 0a 2480 2424 1b",
            "\ufffdA\ufffd(C\ufffd\ufffdあ\ufffd\ufffdい\ufffd",
        ),
    ],
)
def test_sequences_and_errors(label, sequence, text):
    assert text_of(bytes.fromhex(sequence), label) == text
