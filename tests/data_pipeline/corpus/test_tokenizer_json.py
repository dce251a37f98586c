"""Tokenizers of the shapes published beside Llama 3, Qwen3, Gemma and Llama 2 give the ids of transformers."""

import itertools
import json
import pickle
import shutil

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus.tokenizer import Tokenizer, load, save, tokenizer_json
from data_pipeline.corpus.tokenizer.text_model import Roles
from tests.support.published_tokenizers import KINDS, ODD, PIECES, SPELLED, write
from tests.support.reading import c4_pages
from tests.support.tables import each


@pytest.fixture(scope="module")
def both(published_tokenizers):
    """kind → (our tokenizer of the directory, transformers')"""
    read, theirs = tokenizer_json.read, transformers.AutoTokenizer.from_pretrained
    return {kind: (read(published_tokenizers / kind), theirs(published_tokenizers / kind)) for kind in KINDS}


@each("kind", KINDS)
def test_ids_are_those_of_transformers(both, kind):
    ours, theirs = both[kind]
    assert ours.size == len(theirs)
    real = c4_pages()[:30]
    for text in (*ODD, *real, "".join(real) * 3):
        assert ours.encode([text])[0] == theirs(text, add_special_tokens=False).input_ids, text[:40]
    together = [*real, "", *ODD]
    assert ours.encode(together) == [ours.encode([text])[0] for text in together]
    assert ours.encode([]) == []


@settings(max_examples=60)
@given(text=st.text())
def test_ids_of_any_text_are_those_of_transformers(both, text):
    for ours, theirs in both.values():
        assert ours.encode([text])[0] == theirs(text, add_special_tokens=False).input_ids


@each("kind, text", itertools.product(KINDS, SPELLED))
def test_a_text_that_spells_a_special_token_stays_text(both, kind, text):
    """In Llama 2's a merge makes <s>; and transformers finds special tokens in any text unless told otherwise."""
    ours, theirs = both[kind]
    (ids,) = ours.encode([text])
    assert not ours.names.keys() & set(ids)
    assert ours.decode(ids) == text
    assert pickle.loads(pickle.dumps(ours)).encode([text]) == [ids]
    split = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert ("<s>" in text and kind == "Llama 2") == (ids != split)


@each("kind", KINDS)
def test_a_word_begins_behind_a_sentinel_only_after_a_space(both, kind):
    """Llama 2 puts ▁ before each text, but behind no token inside one."""
    ours, _ = both[kind]
    tokenizer = Tokenizer(pickle.loads(pickle.dumps(ours)), sentinels=2)
    start = len(tokenizer.encode(["MKT"])[0]) + 1
    for text, begins in (("AY", False), (" AY", True)):
        found = tokenizer.encode_with_sentinels(f"MKT<extra_id_0>{text}")
        assert tokenizer.vocabulary.word_starts[found[start]] == begins
        assert tokenizer.decode(found) == f"MKT <extra_id_0>{text}"
        assert pickle.loads(pickle.dumps(tokenizer)).encode_with_sentinels(f"MKT<extra_id_0>{text}") == found


def test_added_tokens_that_are_not_special_match_text(published_tokenizers):
    qwen, gemma = (tokenizer_json.read(published_tokenizers / kind) for kind in ("Qwen3", "Gemma"))
    assert [gemma.saved["model"]["vocab"][name] for name in ("<table>", "\n\n")] == gemma.encode(["<table>\n\n"])[0]
    (ids,) = qwen.encode(["<think>a</think>"])
    assert [ids[0], ids[-1]] == [qwen.size - 2, qwen.size - 1]
    assert (qwen.vocabulary.text, gemma.vocabulary.text) == ((0, PIECES), (6, PIECES))


EOT = {"eos_token": "<|eot_id|>"}
ROLES = {
    "Llama 3": Roles(pad=PIECES + 1, eos=PIECES + 1, bos=PIECES),
    "Qwen3": Roles(pad=PIECES, eos=PIECES + 2),
    "Gemma": Roles(pad=0, eos=1, bos=2, unk=3, mask=4),
    "Llama 2": Roles(pad=2, eos=2, bos=1, unk=0),
}


@each("kind", KINDS)
def test_roles_are_those_that_the_files_name(both, kind):
    ours, _ = both[kind]
    assert ours.roles == ROLES[kind]
    vocabulary = Tokenizer(ours, ["[R]"], 10).vocabulary
    assert (vocabulary.eos, vocabulary.special["[R]"]) == (ROLES[kind].eos, ours.size)
    assert vocabulary.first_sentinel == vocabulary.size - 1 == ours.size + 10
    unplain = [note for note in ours.notes if "no file names a token for padding" in note]
    assert bool(unplain) == (kind in ("Llama 3", "Llama 2"))


@each(
    "files, expected, note",
    [
        ({"config.json": {"eos_token_id": [PIECES + 1, PIECES + 3]}}, ROLES["Llama 3"], "<|eot_id|>"),
        ({"generation_config.json": {"pad_token_id": PIECES + 2}}, Roles(PIECES + 2, PIECES + 1, bos=PIECES), None),
        ({"config.json": {"pad_token_id": -1}}, ROLES["Llama 3"], "no file names a token for padding"),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": 7}}, Roles(7, 7), "no file names a token for"),
        ({"special_tokens_map.json": EOT, "tokenizer_config.json": {}}, Roles(PIECES + 3, PIECES + 3), None),
    ],
)
def test_roles_come_from_the_models_files_too(published_tokenizers, tmp_path, files, expected, note):
    shutil.copytree(published_tokenizers / "Llama 3", tmp_path, dirs_exist_ok=True)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = tokenizer_json.read(tmp_path)
    assert found.roles == expected
    assert note is None or any(note in line for line in found.notes)


def test_a_file_by_itself_has_roles_by_the_usual_names(published_tokenizers, tmp_path):
    shutil.copy(published_tokenizers / "Gemma/tokenizer.json", tmp_path)
    found = tokenizer_json.read(tmp_path / "tokenizer.json")
    assert found.roles == Roles(pad=0, eos=1, bos=2, unk=3)
    assert found.encode(ODD) == tokenizer_json.read(published_tokenizers / "Gemma").encode(ODD)


@each("kind", KINDS)
def test_a_saved_tokenizer_is_loaded_as_it_was(both, tmp_path, kind):
    ours, _ = both[kind]
    tokenizer = Tokenizer(ours, ["[R]"], 10)
    save(tokenizer, tmp_path)
    again = load(tmp_path)
    assert again.describe() == tokenizer.describe()
    assert again.encode(ODD) == tokenizer.encode(ODD)
    assert tokenizer_json.read(tmp_path / "tokenizer").sha256 == ours.sha256  # as a corpus file names it
    shown = again.decode([*again.encode(["Some text"])[0], again.size - 1, *again.encode([" and more"])[0]])
    assert shown == "Some text <extra_id_0> and more"


@each("kind", KINDS)
def test_parts_of_a_long_text_have_the_ids_that_it_has_whole(both, monkeypatch, kind):
    """Llama 3's merges join a full stop and the line break behind it: no cut lies before a break."""
    ours, _ = both[kind]
    long = "".join(c4_pages()[:5] + ODD)
    (whole,) = ours.encode([long])
    monkeypatch.setattr("data_pipeline.corpus.tokenizer.text_model._PART_CHARACTERS", 50)
    assert len(list(ours.parts(long))) > len(long) / 120
    assert ours.encode([long, "", long]) == [whole, [], whole]


def test_a_text_is_not_cut_where_that_would_change_its_ids(published_tokenizers, tmp_path, monkeypatch):
    """A space before each text, as the file itself says of Llama 2's, would stand before each part too."""
    shutil.copy(published_tokenizers / "Llama 2/tokenizer.json", tmp_path)
    found = tokenizer_json.read(tmp_path)
    text = c4_pages()[0]
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False)
    monkeypatch.setattr("data_pipeline.corpus.tokenizer.text_model._PART_CHARACTERS", 50)
    assert found.encode([text]) == [whole.ids]


@each("kind", KINDS)
def test_words_start_and_sentences_end(both, kind):
    ours, _ = both[kind]
    (ids,) = ours.encode(["One day. The other"])
    vocabulary = ours.vocabulary
    assert sum(vocabulary.word_starts[ids[1:]]) == 3
    assert sum(vocabulary.sentence_ends[ids]) == 1
    assert not vocabulary.word_starts[list(ours.names)].any()


def made_of_a_word(saved):
    """Where whole words are looked up before merging, a word of the vocabulary is found however it was made."""
    token = next(one for one in saved["model"]["vocab"] if one.isalpha() and one.isascii() and len(one) == 4)
    saved["added_tokens"].append({**saved["added_tokens"][0], "id": saved["model"]["vocab"][token], "content": token})


def unigram(saved):
    saved |= {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}, "added_tokens": []}


@each(
    "change, kind, problem",
    [
        (lambda saved: saved.update(model={"type": "BPE", "vocab": 3}), FailedError, r"tokenizer\.json: damaged: "),
        (
            unigram,
            UserError,
            r"tokenizer\.json: a tokenizer of kind Unigram; tokenizer_json reads BPE, WordPiece, WordLevel",
        ),
        (made_of_a_word, UserError, r"becomes the special token \w{4}; text must stay text"),
    ],
)
def test_a_file_that_cannot_be_read_as_it_is_meant_is_refused(published_tokenizers, tmp_path, change, kind, problem):
    shutil.copytree(published_tokenizers / "Llama 3", tmp_path, dirs_exist_ok=True)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    change(saved)
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(kind, match=problem) as error:
        tokenizer_json.read(tmp_path)
    assert "\n" not in str(error.value)


def test_a_directory_without_what_is_needed_is_refused(tmp_path):
    for path, problem in {"nowhere": "expected tokenizer.json", ".": "tokenizer.json: no such file"}.items():
        with pytest.raises(UserError, match=problem):
            tokenizer_json.read(tmp_path / path)
    write("Llama 3", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="no file names an EOS token: expected eos_token"):
        tokenizer_json.read(tmp_path)


def test_sentinels_that_the_tokenizer_has_already_are_refused(tmp_path):
    write("Llama 3", tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<extra_id_0>", "<extra_id_1>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.sentinels: the tokenizer has a token <extra_id_0> already"):
        Tokenizer(tokenizer_json.read(tmp_path), (), 2)
