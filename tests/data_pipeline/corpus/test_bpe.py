"""BPE is trained by the library to the same bytes each time, and every text comes back."""

import subprocess
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer, load, save
from data_pipeline.corpus.tokenizer.bpe import BPEConfig, largest_vocabulary
from tests.support.published_tokenizers import ODD, SPELLED
from tests.support.reading import c4_pages

SIZE = 600


@pytest.fixture(scope="module")
def model():
    return BPEConfig(vocab_size=SIZE).train([page.encode() for page in c4_pages()[:200]])


def test_merges_are_those_of_the_library(model):
    """Trained with the documented calls of `tokenizers`, without a special token: ids differ by those two."""
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer, theirs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"vocab_size": SIZE - 2, "min_frequency": 2, "initial_alphabet": alphabet, "show_progress": False}
    theirs.train_from_iterator(c4_pages()[:200], trainers.BpeTrainer(**options))
    assert model.size == SIZE
    for text in (*c4_pages()[200:230], *ODD):
        assert model.encode([text]) == [[id_ + 2 for id_ in theirs.encode(text).ids]]


def test_roles_and_text(model):
    vocabulary = Tokenizer(model, ["<mask>"], 5).vocabulary
    assert (vocabulary.pad, vocabulary.eos, vocabulary.unk, vocabulary.mask) == (0, 1, None, SIZE)
    assert (vocabulary.text, vocabulary.sentinel(0)) == ((2, SIZE), SIZE + 5)


def test_every_text_comes_back(model):
    tokenizer = Tokenizer(model, ["<mask>"], 5)
    for text in (*c4_pages()[200:230], *ODD, *SPELLED, "</s> <pad> <mask> <extra_id_0>"):
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text


TRAIN = f"""
from data_pipeline.corpus.tokenizer.bpe import BPEConfig, largest_vocabulary
from tests.support.reading import c4_pages
print(BPEConfig(vocab_size={SIZE}).train([page.encode() for page in c4_pages()[:200]]).sha256)
"""


def test_other_processes_train_the_same_bytes(model):
    """Rust's maps of words are in another order in each process."""
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == model.sha256


MOLECULES = [b"c1ccc(C)cc1", b"Cc1ccc(C)cc1", b"c1ccc(CC)cc1 c1ccc(C)cc1"]


@pytest.mark.parametrize(
    ("pattern", "token", "crosses"),
    [(None, "ccc", "c1ccc"), (r"\(|\)|[^()]+", "c1ccc", "c1ccc("), (".+", "c1ccc(C)cc1", "\n")],
)
def test_no_token_crosses_a_border_of_the_pattern(pattern, token, crosses):
    model = BPEConfig(vocab_size=largest_vocabulary(MOLECULES, pattern), pattern=pattern).train(MOLECULES)
    assert token in model.tokens.values()
    assert not [one for one in model.tokens.values() if crosses in one]
    for text in ("c1ccc(C)cc1", *ODD):
        assert model.decode(model.encode([text])[0]) == text


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match=r"(?s)pattern.*not a regular expression of Oniguruma"):
        BPEConfig(pattern="(")


def test_more_tokens_than_the_sample_gives_are_refused():
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size: the sample gives at most \d+ tokens, not 32,000"):
        BPEConfig().train([b"a few words, a few words"])
    with pytest.raises(ValueError, match="vocab_size"):
        BPEConfig(vocab_size=258)


def test_a_saved_tokenizer_is_loaded_as_it_was(model, tmp_path):
    tokenizer = Tokenizer(model, ["[R]"], 5)
    save(tokenizer, tmp_path)
    assert load(tmp_path).describe() == tokenizer.describe()
    for path in (tmp_path, tmp_path / "tokenizer", tmp_path / "tokenizer/tokenizer.json"):
        assert BPEConfig(path=str(path)).existing().sha256 == model.sha256
