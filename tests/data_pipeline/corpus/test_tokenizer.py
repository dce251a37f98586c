"""Tokenizers give the ids of the models' own libraries, and no text becomes a special token or sentinel."""

import dataclasses
import itertools
import json
import pickle
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import sentencepiece
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer, load, normalization, save, tokenizer_json
from data_pipeline.corpus.tokenizer.byt5 import BytesConfig
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece, SentencePieceConfig, train
from data_pipeline.corpus.tokenizer.text_model import ends_sentence
from data_pipeline.stages import report
from data_pipeline.stages.tokens import Coverage
from tests.conftest import run as run_command
from tests.conftest import write_c4, write_corpus_file
from tests.support.builds import documents_of, trained
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.reading import c4_pages
from tests.support.runs import install_page
from tests.support.slow import slow
from tests.support.tables import each

UP_TO_TOKENIZER = ("data-pipeline", "build", "--until", "tokenizer")
SPELLED = "A <mask>, </s> and <s>, <pad>; <|endoftext|> [R] <unk> <extra_id_0> madeupword0000."


@pytest.fixture(scope="module")
def gpt2(byte_level_bpe):
    return Tokenizer(tokenizer_json.read(byte_level_bpe / "gpt2"))


@pytest.fixture(scope="module")
def bart(byte_level_bpe):
    return Tokenizer(tokenizer_json.read(byte_level_bpe / "bart"))


@pytest.fixture
def spiece(small_corpus):
    return SentencePiece.read(small_corpus / "tokenizer/spiece.model")


def same(one: Tokenizer, other: Tokenizer) -> bool:
    first, second = (dataclasses.asdict(tokenizer.vocabulary) for tokenizer in (one, other))
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def test_gpt2s_and_barts_ids(gpt2, bart):
    """In BART's documentation "Hello world" is 0, 31414, 232, 2, marks included."""
    assert gpt2.encode(["Hello world", " the", ".", ""]) == [[15496, 995], [262], [13], []]
    vocabulary = gpt2.vocabulary
    assert (vocabulary.size, vocabulary.text) == (50_257, (0, 50_256))
    assert vocabulary.eos == vocabulary.bos == vocabulary.pad == 50_256  # <|endoftext|>
    assert (vocabulary.unk, vocabulary.mask, vocabulary.special) == (None, None, {})
    assert bart.encode(["Hello world", " the", "."]) == [[31_414, 232], [5], [4]]
    vocabulary = bart.vocabulary
    assert (vocabulary.bos, vocabulary.pad, vocabulary.eos, vocabulary.unk) == (0, 1, 2, 3)
    assert (vocabulary.size, vocabulary.mask) == (50_265, 50_264)
    assert vocabulary.text == (4, 50_260)  # the rest stands for no text
    assert vocabulary.special == {f"madeupword000{n}": 50_261 + n for n in range(3)} | {"<|endoftext|>": 50_260}


def test_ids_are_those_of_transformers(gpt2, bart, byte_level_bpe):
    c4_texts = c4_pages()[:150]
    ids = json.loads((byte_level_bpe / "gpt2/encoder.json").read_text(encoding="utf-8"))
    lines = (byte_level_bpe / "gpt2/vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    theirs = transformers.GPT2Tokenizer(vocab=ids, merges=merges)
    assert theirs(c4_texts).input_ids == gpt2.encode(c4_texts)
    ids = json.loads((byte_level_bpe / "bart/vocab.json").read_text(encoding="utf-8"))
    theirs = transformers.BartTokenizer(vocab=ids, merges=merges)
    assert theirs(c4_texts).input_ids == [[0, *text, 2] for text in bart.encode(c4_texts)]
    assert (theirs.mask_token_id, len(theirs)) == (bart.vocabulary.mask, bart.size)


@settings(max_examples=50)
@given(text=st.text())
def test_any_text_comes_back_from_bytes(gpt2, bart, text):
    for tokenizer in (gpt2, bart):
        (ids,) = tokenizer.encode([text])
        first, end = tokenizer.vocabulary.text
        assert all(first <= id_ < end for id_ in ids)
        assert tokenizer.decode(ids) == text


def test_special_tokens_stand_between_pieces_and_sentinels(spiece):
    tokenizer = Tokenizer(spiece, ["<mask>", "[R]", "<s>", "[CLS]"], 20)
    vocabulary = tokenizer.vocabulary
    assert (vocabulary.mask, vocabulary.bos, vocabulary.special) == (500, 502, {"[R]": 501, "[CLS]": 503})
    assert (vocabulary.size, vocabulary.first_sentinel, vocabulary.sentinel_ids) == (524, 523, range(504, 524))
    assert (vocabulary.text, vocabulary.pad, vocabulary.eos, vocabulary.unk) == ((3, 500), 0, 1, 2)
    ids = [501, *tokenizer.encode(["a page"])[0], 500, 523, 522, 504, 1, 0]
    assert tokenizer.decode(ids) == "[R] a page <mask> <extra_id_0> <extra_id_1> <extra_id_19>"
    vocabulary = Tokenizer(spiece).vocabulary
    assert (vocabulary.size, vocabulary.sentinels, list(vocabulary.sentinel_ids)) == (500, 0, [])
    assert max(Tokenizer(spiece).encode_with_sentinels("see <extra_id_0> there")) < 500


def test_text_that_spells_special_tokens_stays_text(gpt2, bart, spiece):
    for model, special in [(gpt2.model, ["<mask>", "[R]"]), (bart.model, ["[R]"]), (spiece, ["<mask>", "[R]"])]:
        tokenizer = Tokenizer(model, special, 20)
        (ids,) = tokenizer.encode([SPELLED])
        first, end = tokenizer.vocabulary.text
        assert all(first <= id_ < end or id_ == tokenizer.vocabulary.unk for id_ in ids)
    assert gpt2.decode(gpt2.encode([SPELLED])[0]) == SPELLED


def test_sentinels_and_masks_where_they_are_asked_for(gpt2, bart, spiece):
    tokenizer = Tokenizer(gpt2.model, [], 2)
    ids = tokenizer.encode_with_sentinels("see <extra_id_0> there <extra_id_1>.")
    assert ids == [3826, 50_258, 612, 50_257, 13, 50_256]  # "see", " there", "."
    assert tokenizer.decode(ids) == "see <extra_id_0> there <extra_id_1>."
    ids = tokenizer.encode_with_sentinels("see <extra_id_1> there <extra_id_1> <extra_id_0>")
    assert ids == [3826, 50_257, 612, 50_257, 50_258, 50_256]  # in any order, and again
    for no_sentinel in ("<extra_id_2>", "<extra_id_00>"):
        text = f"see {no_sentinel}"
        assert tokenizer.encode_with_sentinels(text) == [*gpt2.encode([text])[0], 50_256]
    assert bart.encode_with_sentinels("Hello <mask> world") == [31_414, 50_264, 232, 2]
    assert bart.decode([0, 31_414, 50_264, 232, 2, 1]) == "<s>Hello <mask> world"
    assert bart.encode_with_sentinels("Hello<mask> <mask> world") == [31_414, 50_264, 50_264, 232, 2]
    tokenizer = Tokenizer(spiece, ["<mask>", "<s>"], 2)
    (see,), (there,), (dot,) = (tokenizer.encode([text]) for text in ("see", "there", "."))
    ids = tokenizer.encode_with_sentinels("see <mask> there <extra_id_0> <extra_id_1> .")
    assert ids == [*see, tokenizer.vocabulary.mask, *there, 503, 502, *dot, 1]
    assert tokenizer.vocabulary.mask not in Tokenizer(spiece).encode_with_sentinels("see <mask> there")


@each("kind", ["spiece", *slow("bart")])
def test_a_description_gives_the_same_tokenizer(kind, request, tmp_path):
    model = request.getfixturevalue(kind)
    tokenizer = Tokenizer(model if kind == "spiece" else model.model, ["[R]", "[S]"], 7)
    save(tokenizer, tmp_path)
    described = tokenizer.describe()
    texts = ["Some text, saved.", "And more…"]
    for again in (load(tmp_path), load(tmp_path, described), pickle.loads(pickle.dumps(tokenizer))):
        assert same(again, tokenizer)
        assert again.encode(texts) == tokenizer.encode(texts)
        assert again.describe() == described
    assert (described.special["[R]"], described.first_sentinel) == (tokenizer.vocab_size, tokenizer.size - 1)
    with pytest.raises(FailedError, match="not the tokenizer"):
        load(tmp_path, dataclasses.replace(described, sha256="0" * 64))
    (tmp_path / "tokenizer/description.json").unlink()
    with pytest.raises(UserError, match=r"description\.json: no such file"):
        load(tmp_path)


def test_names_of_files_change_nothing(gpt2, bart, byte_level_bpe, tmp_path):
    """Hugging Face's names for GPT-2's files describe the same tokenizer."""
    shutil.copy(byte_level_bpe / "gpt2/encoder.json", tmp_path / "vocab.json")
    shutil.copy(byte_level_bpe / "gpt2/vocab.bpe", tmp_path / "merges.txt")
    assert tokenizer_json.read(tmp_path).sha256 == gpt2.sha256 != bart.sha256
    save(bart, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert theirs("Hello world").input_ids == [0, 31_414, 232, 2]


def test_a_long_text_is_encoded_in_parts_as_well_as_whole(small_corpus, spiece, gpt2, monkeypatch):
    """The parts give as many pieces; they differ only where two segmentations tie ("1 11" and "11 1")."""
    texts = [row["text"] for row in pq.read_table(small_corpus / "documents/part-00000.parquet").to_pylist()]
    whole = spiece.encode(texts)
    monkeypatch.setattr("data_pipeline.corpus.tokenizer.text_model._PART_CHARACTERS", 100)
    parts = spiece.encode(texts)
    assert [sorted(ids) for ids in parts] == [sorted(ids) for ids in whole]
    assert list(map(spiece.decode, parts)) == list(map(spiece.decode, whole))
    assert sum(one != other for one, other in zip(parts, whole, strict=True)) < 0.05 * len(texts)
    for tokenizer in (spiece, gpt2):  # a word longer than a part has other ids, and is the same text
        assert tokenizer.decode(tokenizer.encode(["word" * 100])[0]) == "word" * 100


WORDS_AND_SPACES = ["word", "'s", "1", "...", " ", "  ", "\n", "\n\n\n", *"\t\xa0\x1c\x85\u3000\u200b"]


@given(words=st.lists(st.sampled_from(WORDS_AND_SPACES), min_size=30))
def test_a_text_is_cut_where_white_space_begins(gpt2, words):
    """White space is defined by GPT-2's pattern, to which "\n\n\n" is one match."""
    text = "".join(words)
    assume(max(map(len, re.split(r"([^\S\x1c-\x1f]+)", text))) < 20)
    (whole,) = gpt2.encode([text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.corpus.tokenizer.text_model._PART_CHARACTERS", 40)
        assert gpt2.encode([text]) == [whole]


def test_words_start_with_white_space(gpt2, bart):
    def words(tokenizer: Tokenizer, text: str) -> list[str]:
        (ids,) = tokenizer.encode([text])
        starts = [0, *(place for place, id_ in enumerate(ids) if place and tokenizer.vocabulary.word_starts[id_])]
        return [tokenizer.decode(ids[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]

    text = "Pretokenization isn't hyperparametrization,\nhe said. Łódź 日本語"
    expected = ["Pretokenization", " isn't", " hyperparametrization,", "\nhe", " said.", " Łódź", " 日本語"]
    assert words(gpt2, text) == words(bart, text) == expected
    assert not bart.vocabulary.word_starts[[*range(4), *range(50_260, 50_265)]].any()


def in_bytes(pieces: int = 280, **settings: object) -> SentencePiece:
    sample = ["the cat sat on the mat.", "the dog ate the cat.", "King Zog: a ☃!"] * 20
    config = SentencePieceConfig.model_validate({"vocab_size": pieces, "character_coverage": 0.98, **settings})
    return train(config, [text.encode() for text in sample])


def test_characters_without_a_piece_become_bytes_by_default():
    """UTF-8 of Q is 51, of ☃ E2 98 83; the 256 bytes are the pieces 3 to 258. A part of a character shows as �."""
    model = in_bytes()
    assert (model.size, model.byte_ids) == (280, frozenset(range(3, 259)))
    (ids,) = model.encode(["the Q ☃"])
    assert [id_ - 3 for id_ in ids if id_ in model.byte_ids] == [0x51, 0xE2, 0x98, 0x83]
    assert model.decode(ids) == "the Q ☃"
    assert model.decode(ids[-2:]) == "\ufffd\ufffd"
    tokenizer = Tokenizer(model, sentinels=2)
    assert tokenizer.decode([ids[-3], 281, *ids[-3:], 280]) == "\ufffd <extra_id_0>☃ <extra_id_1>"
    lost = in_bytes(25, byte_fallback=False)
    assert not lost.byte_ids
    assert lost.encode(["the Q ☃"])[0].count(2) == 2


CODE = [
    "def area(r):\n    if r:\n        return 3.14 * r ** 2\n\n",
    "\twhile True:\n\t\tx = r\n    \r\n  return T²",
] * 20
KEPT = [
    "",
    " ",
    "a\n\n  b\t c  ",
    "\n",
    "T² ﬁ ½",
    "\r\n\r",
    "▁a▁ ▁▁",
    "\0\x1c\x85\u3000\u2028",
    " " * 77 + "x",
    "<0x41>",
]


@pytest.fixture(scope="module")
def exact():
    config = SentencePieceConfig(vocab_size=290, normalization="identity")
    return train(config, [text.encode() for text in CODE * 20])


def test_every_text_comes_back_as_it_was_with_identity(exact):
    for text in (*CODE, *KEPT):
        (ids,) = exact.encode([text])
        assert exact.decode(ids) == text
        assert not {0, 1, 2} & {*ids}

    @settings(max_examples=200, deadline=None)
    @given(text=st.lists(st.sampled_from([*KEPT, "r", "return", "é", "e\u0301", "😀", "\ud7ff"])).map("".join))
    def every(text):
        assert exact.decode(exact.encode([text])[0]) == text

    every()
    with pytest.raises(
        ValueError, match="vocab_size: 262 tokens are too few for byte_fallback, which takes 256 of them b"
    ):
        SentencePieceConfig(vocab_size=262, normalization="identity")
    lines, tab, (indentation, *_) = (exact.encode([text])[0] for text in ("\n", "\t", "        return"))
    assert (len(lines), len(tab), exact.decode([indentation]).strip(" ")) == (1, 1, "")
    assert exact.vocabulary.word_starts[[*lines, *tab, indentation]].all()
    without = train(
        SentencePieceConfig(vocab_size=35, normalization="identity", byte_fallback=False), map(str.encode, CODE)
    )
    assert without.encode(["a\n\t  b☃▁☃"])[0].count(2) == 1  # neighbouring unknown characters are one token
    for text in CODE:
        assert without.decode(without.encode([text])[0]) == text


def test_a_model_is_t5s_by_default(spiece):
    """T5's normalization: NFKC, and one space for all white space."""
    assert spiece.normalizer_spec.name == "nmt_nfkc"
    model = in_bytes()
    assert model.decode(model.encode(["  T² \n\n\tﬁ  "])[0]) == "T2 fi"
    assert not model.keeps_text
    with pytest.raises(ValueError, match="normalization"):  # a key of sentencepiece alone
        BytesConfig(normalization="identity")


def test_changes_by_normalization_are_counted(exact):
    """By hand: 4 line breaks, 1 tab, the 4 spaces of an indentation and the one at the end, ² once, ﬁ and ﬂ twice, and
    é twice from e and a mark; é as one character stays."""
    texts = ["x\n\n    y\tT² ", "ﬁ\nﬁ ﬂ\nﬂ", "plain text", "cafe\u0301, e\u0301, é"]
    expected = {"\n": 4, "\t": 1, normalization.RUN: 2, normalization.DECOMPOSED: 2, "²": 1, "ﬁ": 2, "ﬂ": 2}
    changes = normalization.Changes()
    for text in texts:
        changes.add(text)
    assert changes.counts == expected
    for model, counts in ((in_bytes(), expected), (exact, {})):
        coverage = Coverage(model)
        coverage.add(np.array([], dtype=np.uint16), *texts)
        assert coverage.changed == counts
    found = "line breaks (4), tabs (1), runs of spaces (2), decomposed characters (2) and other characters (5: ﬁ, ﬂ, ²)"
    assert normalization.describe(expected).startswith(
        f"normalization changes {found}, and decoding doesn't bring them back; a token"
    )
    assert normalization.describe({}) == ""
    assert [*map(normalization.name, ["\n", normalization.RUN, normalization.DECOMPOSED, "²", "\xad"])] == [
        "line break",
        "run of spaces",
        "decomposed character",
        "²",
        "U+00AD",
    ]


def test_every_character_of_the_sample_has_a_token_by_default_without_bytes():
    """B and r are 2 of 40,005 characters: the most frequent 0.9995 of them leave both out."""
    assert SentencePieceConfig().character_coverage == 0.9995
    sample = [b"CCOCCNCC=O" * 200] * 20 + [b"BrCCO"]
    ids = {}
    for size, coverage in ((10, {}), (10, {"character_coverage": None}), (8, {"character_coverage": 0.9995})):
        config = SentencePieceConfig.model_validate({"vocab_size": size, "byte_fallback": False, **coverage})
        (ids[config.character_coverage],) = train(config, sample).encode(["CCBrO"])
    assert 2 not in ids[1.0]
    assert 2 in ids[0.9995]


def test_unknown_tokens_above_a_ten_thousandth_are_a_warning():
    config = SentencePieceConfig(byte_fallback=False)
    assert report.unknown_tokens(report.Coverage(10_000, 1, 0, {"X": 1}), config) == ""
    said = report.unknown_tokens(report.Coverage(10_000, 2, 0, {"X": 2}), config)
    lost = "2 of 10,000 tokens (0.02%) are unknown, and their text is lost, most often X 2"
    assert said.startswith(
        f"warning: {lost}; set tokenizer.byte_fallback to true, or tokenizer.character_coverage to 1"
    )
    assert "m.model doesn't know this text" in report.unknown_tokens(
        report.Coverage(10_000, 2, 0, {}), config.model_copy(update={"path": "m.model"})
    )


@each("kind", ["t5", "identity"])
def test_a_sentinel_inside_a_word_leaves_the_tokens_that_training_has(kind, exact):
    """Of a row for training, any span of tokens is masked, shown as text, and read back. A space before a sentinel is
    part of it, so no row that is read has a space alone there."""
    tokenizer = Tokenizer(in_bytes() if kind == "t5" else exact, sentinels=2)
    (row,) = tokenizer.encode(["MKTAYIAKQR the cat, (x) sat"])
    for start, end in itertools.combinations(range(1, len(row)), 2):
        if tokenizer.decode([row[start - 1]]).strip():
            masked = [*row[:start], tokenizer.size - 1, *row[end:]]
            assert tokenizer.encode_with_sentinels(tokenizer.decode(masked)) == [*masked, 1]
    first, word = tokenizer.encode(["MKT", " AY"])
    within, apart = (
        tokenizer.encode_with_sentinels(f"MKT<extra_id_0>{text}")[len(first) + 1 : -1] for text in ("AY", " AY")
    )
    assert (tokenizer.decode(within), tokenizer.vocabulary.word_starts[within].any()) == ("AY", False)
    assert apart == word


def test_words_start_with_the_space_mark_and_bytes_of_rare_characters_start_none():
    tokenizer = Tokenizer(in_bytes(), ["[R]"], 20)
    (ids,) = tokenizer.encode(["the cat 😀 ate."])
    starts, ends = tokenizer.vocabulary.word_starts, tokenizer.vocabulary.sentence_ends
    assert sum(starts[ids]) == 4
    assert [tokenizer.decode([id_]) for id_ in ids if ends[id_]] == ["."]
    assert not starts[[0, 1, 2, *range(280, 301)]].any()
    assert len(starts) == len(ends) == 301


def test_a_vocabulary_without_room_for_the_bytes_or_the_characters_is_refused():
    with pytest.raises(UserError) as error:
        in_bytes(262)
    told = "tokenizer.vocab_size: 262 tokens are too few: the sample's characters and 256 bytes need 277; ask"
    assert re.match(told, str(error.value))
    assert str(error.value).endswith("lower character_coverage, or set byte_fallback to false")
    with pytest.raises(UserError, match=r"10 tokens are too few: the sample's characters need 21; ask for more"):
        in_bytes(10, byte_fallback=False)


def test_tokens_that_are_unknown_or_bytes_are_counted_with_their_characters():
    """The é is two characters that become one; the last two texts have no such token."""
    texts = ["☃☃ K the", "K☃ cafe\u0301", "K", "the cat sat"]
    for model, counts in (
        (in_bytes(), {"unknown": 0, "bytes": 3 * 3 + 1 + 2}),  # ☃ has 3 bytes, f 1, é 2
        (in_bytes(25, byte_fallback=False), {"unknown": 3, "bytes": 0}),  # ☃☃, ☃ and fé
    ):
        coverage = Coverage(model)
        for text, ids in zip(texts, model.encode(texts), strict=True):
            coverage.add(np.array(ids, dtype=np.uint16), text)
        assert coverage.tokens == counts
        assert list(coverage.characters.items()) == [("☃", 3), ("f", 1), ("é", 1)]


def test_characters_without_a_token_are_counted_for_each_million_characters(monkeypatch):
    model, counted = in_bytes(), []
    monkeypatch.setattr(model, "without_token", lambda texts: counted.append(sum(map(len, texts))) or {})
    coverage, (ids,) = Coverage(model), model.encode(["☃"])
    for _ in range(5):
        coverage.add(np.array(ids, dtype=np.uint16), "☃" * 400_000, "☃" * 200_000)
    assert counted == [1_200_000, 1_200_000]
    assert coverage.characters == {}
    assert counted == [1_200_000, 1_200_000, 600_000]


def test_a_build_follows_t5s_conventions_and_tells_which_characters_have_no_token(small_corpus):
    """Compared with the tokens that sentencepiece finds in each document."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(small_corpus / "tokenizer/spiece.model"))
    assert (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id()) == (0, 1, 2, -1)
    described = json.loads((small_corpus / "manifest.json").read_text())["tokenizer"]
    assert (described["pieces"], described["size"], described["first_sentinel"]) == (500, 520, 519)
    texts = [row["text"] for row in documents_of(small_corpus)]
    unknown = sum(ids.count(processor.unk_id()) for ids in processor.encode(texts))
    found = report.read(small_corpus)
    assert (found.coverage.unknown, found.coverage.bytes) == (unknown, 0)
    assert unknown > 10
    assert f"{unknown:,} of them unknown" in report.coverage(found)
    assert "## Characters without a token" in (small_corpus / "report.md").read_text()


def test_ends_of_sentences_are_told_from_other_stops():
    for text in [".", "!", " ?", "...", '."', ".”", "?!)", " 2018.", "。", "」。", "。」", ".\n"]:
        assert ends_sentence(text), text
    for text in ["", " ", ",", ".com", "3.5", ":", ";", '"', "Mr", "。a", "…"]:
        assert not ends_sentence(text), text


@pytest.mark.slow
def test_another_kind_replaces_the_files_of_the_former(byte_level_bpe, tmp_path):
    write_c4(tmp_path / "c4.json.gz", records=20)
    config = write_corpus_file(tmp_path / "corpus.yaml")
    done_here(*UP_TO_TOKENIZER, config)
    path = f"tokenizer.path={byte_level_bpe}/gpt2"
    done_here(*UP_TO_TOKENIZER, config, "tokenizer.kind=tokenizer_json", path)
    names = {"tokenizer.json", "tokenizer_config.json", "roles.json"}
    assert {file.name for file in (tmp_path / "corpus/tokenizer").iterdir()} == names
    done_here(*UP_TO_TOKENIZER, config, "tokenizer.kind=bytes")
    assert {file.name for file in (tmp_path / "corpus/tokenizer").iterdir()} == {"tokenizer_config.json"}


def test_a_vocabulary_larger_than_the_text_allows_is_refused_by_its_key(tmp_path):
    """The number in the message is the largest vocabulary that the text gives."""
    write_c4(tmp_path / "c4.json.gz", records=3)
    config = write_corpus_file(tmp_path / "corpus.yaml")
    done = run_here(*UP_TO_TOKENIZER, config, "tokenizer.vocab_size=32000")
    assert done.returncode == 2
    (told,) = re.findall(r"^error: tokenizer.vocab_size: the sample gives at most ([0-9,]+) tokens", done.stderr, re.M)
    assert "not 32,000; ask for fewer, or add text" in done.stderr
    most = int(told.replace(",", ""))
    for size, code in ((most + 1, 2), (most, 0)):
        assert run_here(*UP_TO_TOKENIZER, config, f"tokenizer.vocab_size={size}").returncode == code


def test_an_existing_model_is_taken_as_it_is(small_corpus, tmp_path):
    model = small_corpus / "tokenizer/spiece.model"
    write_c4(tmp_path / "c4.json.gz", records=20)
    config = write_corpus_file(tmp_path / "corpus.yaml", tokenizer=trained(small_corpus, special_tokens=["<mask>"]))
    done = run_here("data-pipeline", "build", config)
    assert done.returncode == 0
    assert re.search(r"^warning: .* tokens .* are unknown, .*; \S+ doesn't know this text: choose", done.stderr, re.M)
    assert (tmp_path / "corpus/tokenizer/spiece.model").read_bytes() == model.read_bytes()
    assert same(open_corpus(tmp_path / "corpus").tokenizer, Tokenizer(SentencePiece.read(model), ["<mask>"], 20))
    folder = f"tokenizer.path={small_corpus}"  # the size is the file's, whatever a file that this one extends says
    done = done_here("data-pipeline", "build", config, folder, "tokenizer.vocab_size=32000")
    said = f"500 tokens, as {small_corpus} has them; tokenizer.vocab_size (32,000) is for one that is trained"
    assert f"tokenizer: {said}" in done
    assert (tmp_path / "corpus/tokenizer/spiece.model").read_bytes() == model.read_bytes()
    identity = f"tokenizer.normalization: {model} changes text, not identity; train one (path: null), or leave"
    for override, problem in {
        "tokenizer.normalization=identity": identity,
        f"tokenizer.path={tmp_path}": f"{tmp_path}: expected spiece.model, as kind sentencepiece has it",
        "tokenizer.special_tokens=[<unk>]": "tokenizer.special_tokens: <unk>: the tokenizer has that token already",
        "tokenizer.path=nowhere.model": "nowhere.model: no such file",
    }.items():
        assert problem in refused_here(2, "data-pipeline", "build", config, override)


@each(
    "changes, problem",
    [
        ({"vocab.bpe": None}, "tokenizer.json: no such file"),
        ({"encoder.json": "[}"}, "encoder.json: damaged: not valid JSON"),
        ({"encoder.json": '{"a": 1}'}, "encoder.json: expected tokens with consecutive ids from 0, each used once"),
        ({"encoder.json": '{"a": 0}'}, "encoder.json: has no EOS: neither <|endoftext|> nor </s>"),
        ({"encoder.json": '{"</s>": 0}'}, "vocab.bpe: line 2: encoder.json lacks the token 'Ġ'"),
        ({"vocab.bpe": "#version: 0.2\na b\na b c\n"}, "vocab.bpe: line 3: expected two tokens"),
        ({"dict.txt": "13 7\n"}, "dict.txt: fairseq's dictionary, by which BART's ids differ from GPT-2's; read vocab"),
    ],
)
def test_files_that_do_not_fit_are_refused(byte_level_bpe, tmp_path, changes, problem):
    folder = tmp_path / "files"
    shutil.copytree(byte_level_bpe / "gpt2", folder)
    for name, content in changes.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(content)
    with pytest.raises(UserError) as error:
        tokenizer_json.read(folder)
    assert str(error.value).startswith(str(folder))
    assert problem in str(error.value)


def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "spiece.model").write_bytes(b"no model")
    with pytest.raises(FailedError, match=r"spiece\.model: not a sentencepiece model"):
        SentencePiece.read(tmp_path / "spiece.model")


def test_the_page_on_a_kind_of_tokenizer_works(tmp_path, monkeypatch):
    settings = install_page("reference/own-tokenizers", tmp_path, monkeypatch)
    write_c4(tmp_path / "c4.json.gz", records=40)
    config = write_corpus_file(tmp_path / "corpus.yaml", tokenizer=settings["tokenizer"])
    done = run_command("data-pipeline", "build", config)
    assert done.returncode == 0, done.stderr
    shown = run_command("data-pipeline", "show", tmp_path / "corpus", "-n", "1")
    assert "<extra_id_0>" in shown.stdout
    assert open_corpus(tmp_path / "corpus").manifest.config["packages"] == ["my_package 1.0"]
