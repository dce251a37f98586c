"""Bytes have the ids of transformers' ByT5Tokenizer, and every text comes back to the byte."""

import numpy as np
import pytest
import transformers

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus.tokenizer import Tokenizer, load, save
from data_pipeline.corpus.tokenizer.byt5 import Bytes, BytesConfig
from tests.support.tables import each

# All of Unicode but the surrogates, which no UTF-8 has.
CODES = np.setdiff1d(np.arange(0x110000), np.arange(0xD800, 0xE000))


def random_texts(number: int) -> list[str]:
    """Texts of 0 to 40 characters: half of them ASCII, half from all planes."""
    random = np.random.default_rng(0)
    some = []
    for length in random.integers(0, 41, number):
        codes = np.where(random.random(length) < 0.5, random.integers(0, 128, length), random.choice(CODES, length))
        some.append("".join(map(chr, codes)))
    return some


def test_ids_are_those_of_byt5_and_texts_come_back():
    ours, theirs = Tokenizer(Bytes(), sentinels=125), transformers.ByT5Tokenizer()
    texts = random_texts(10_000)
    ids = ours.encode(texts)
    assert ids == theirs(texts, add_special_tokens=False).input_ids
    assert [ours.decode(one) for one in ids] == texts
    for array, one in zip(ours.model.encode_to_arrays(texts), ids, strict=True):
        assert array.tolist() == one


@each("sentinels", [0, 7, 125])
def test_sentinels_are_those_of_byt5(sentinels):
    ours, theirs = Tokenizer(Bytes(), sentinels=sentinels), transformers.ByT5Tokenizer(extra_ids=sentinels)
    assert ours.size == len(theirs)
    for number in range(sentinels):
        name = f"<extra_id_{number}>"
        assert theirs.convert_tokens_to_ids(name) == 259 + number == ours.vocabulary.sentinel(number)
        assert ours.decode([259 + number]) == name
    assert ours.vocabulary.sentinel_ids == range(259, 259 + sentinels)
    text = "Thank you <extra_id_0> me to<extra_id_1>é"
    if sentinels:
        assert ours.encode_with_sentinels(text) == theirs(text).input_ids
        assert ours.decode(ours.encode_with_sentinels(text)) == text


def test_roles_and_special_tokens():
    vocabulary = Tokenizer(Bytes(), ["<mask>", "[R]"], 10).vocabulary
    assert (vocabulary.pad, vocabulary.eos, vocabulary.unk, vocabulary.bos) == (0, 1, 2, None)
    assert (vocabulary.text, vocabulary.size) == ((3, 259), 271)
    assert (vocabulary.mask, vocabulary.special) == (269, {"[R]": 270})  # behind the sentinels
    assert [n - 3 for n in np.flatnonzero(vocabulary.word_starts)] == [9, 10, 11, 12, 13, 32]
    assert [chr(n - 3) for n in np.flatnonzero(vocabulary.sentence_ends)] == ["!", ".", "?"]


def test_text_that_spells_a_token_stays_text():
    tokenizer = Tokenizer(Bytes(), ["<mask>"], 10)
    for text in ("</s>", "<pad>", "<mask>", "<extra_id_0>"):
        assert tokenizer.encode([text]) == [[byte + 3 for byte in text.encode()]]
    with pytest.raises(UserError, match=r"tokenizer\.special_tokens: </s>: the tokenizer has that token already"):
        Tokenizer(Bytes(), ["</s>"])


def test_a_part_of_a_character_shows_as_a_mark():
    tokenizer = Tokenizer(Bytes())
    (ids,) = tokenizer.encode(["é"])
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_a_saved_tokenizer_is_loaded_as_it_was(tmp_path):
    tokenizer = Tokenizer(Bytes(), ["[R]"], 10)
    save(tokenizer, tmp_path)
    assert load(tmp_path).describe() == tokenizer.describe()
    (tmp_path / "tokenizer/tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(FailedError, match="tokenizer_class is 'T5Tokenizer', not ByT5Tokenizer"):
        load(tmp_path)


def test_the_librarys_tokenizer_gives_the_same_ids():
    backend = Bytes().backend()
    texts = random_texts(300)
    assert [one.ids for one in backend.encode_batch(texts)] == Bytes().encode(texts)


@each("key", ["vocab_size", "path", "normalization"])
def test_keys_of_other_kinds_are_refused(key):
    with pytest.raises(ValueError, match=key):
        BytesConfig.model_validate({key: 300})
