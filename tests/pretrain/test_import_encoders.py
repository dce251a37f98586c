"""Imports BERT with its WordPiece tokenizer as transformers 5 saves it."""

import json
from pathlib import Path

import pytest
import transformers

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import load, save
from data_pipeline.tokenizer.wordpiece import WordPiece
from pretrain.checkpoint.trained import TrainedModel
from pretrain.huggingface import export, import_, tokenizer_files
from tests.tables import each

LICENSE = Path(__file__).parents[2] / "LICENSE"
TEXTS = [
    *LICENSE.read_text(encoding="utf-8").splitlines(),
    'You may add Your own "copyright" statement;  two  spaces\tand a tab.',
    "Naïve façades of Ångström: ½ of the ﬁnal ＷＩＤＥ text, 日本語 too. [SEP] [MASK]x",
    " \n ",
    "w" * 101,
    "",
]
MARKS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
SIZES |= {"max_position_embeddings": 42}


def vocabulary():
    """Marks, all characters of the texts as beginnings and continuations, and the words of the licence."""
    text = "\n".join(TEXTS)
    characters = sorted({character for character in text + text.lower() if not character.isspace()})
    words = sorted({word for word in text.split() if word.isalpha()} | {word.lower() for word in text.split()})
    tokens = dict.fromkeys([*MARKS, *characters, *(f"##{character}" for character in characters), *words, "##ing"])
    return {token: id_ for id_, token in enumerate(tokens)}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A BERT as transformers saves it, with an uncased tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = transformers.BertTokenizer(vocab=vocabulary())
    config = transformers.BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


@each("cased", [False, True])
def test_wordpiece_has_the_ids_of_berts_tokenizer(cased, tmp_path):
    theirs = transformers.BertTokenizer(vocab=vocabulary(), do_lower_case=not cased)
    theirs.save_pretrained(tmp_path)
    ours = tokenizer_files.read(tmp_path)
    plain = [text.replace("[SEP] [MASK]", "") for text in TEXTS]  # their marks match text, ours never do
    assert ours.encode(plain) == [theirs(text, add_special_tokens=False).input_ids for text in plain]
    marks = {ours.vocabulary.bos, ours.vocabulary.eos, ours.vocabulary.mask}
    assert not marks & {id_ for ids in ours.encode(TEXTS) for id_ in ids}
    assert ours.decode(ours.encode(["You may add, your own."])[0]).lower() == "you may add, your own."
    assert (ours.vocabulary.pad, ours.vocabulary.unk, ours.vocabulary.text[0]) == (0, 2, 6)
    assert not ours.vocabulary.word_starts[ours.model._ids["##ing"]]
    save(ours, tmp_path / "kept")
    assert load(tmp_path / "kept").describe() == ours.describe()


def test_googles_list_of_tokens_is_enough(tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary()), encoding="utf-8")
    theirs = transformers.BertTokenizer(vocab=vocabulary())
    found = tokenizer_files.read(tmp_path)
    assert found.encode(TEXTS[:20]) == [theirs(text, add_special_tokens=False).input_ids for text in TEXTS[:20]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert tokenizer_files.read(tmp_path).sha256 != found.sha256
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"vocab\.txt: lacks BERT's tokens \[PAD\], \[UNK\]"):
        WordPiece.read(tmp_path)


def test_a_bert_goes_there_and_back(bert, tmp_path):
    folder, tokenizer = bert
    config = import_(folder, tmp_path / "imported")
    assert (config.family, config.pad_id, config.eos_id, config.next_sentence) == ("encoder_only", 0, 4, False)
    trained = TrainedModel.open(tmp_path / "imported")
    export(trained.model.state_dict(), trained.model.config, trained.tokenizer, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS[:30]:
        assert again(text).input_ids == tokenizer(text).input_ids
    pair = again("a text", "and another", return_token_type_ids=True)
    assert pair.input_ids == tokenizer("a text", "and another").input_ids
    assert (again.cls_token, again.sep_token, again.mask_token) == ("[CLS]", "[SEP]", "[MASK]")
    assert tokenizer_files.read(tmp_path / "out").describe() == trained.tokenizer.describe()


def test_other_wordpieces_are_refused(bert, tmp_path):
    folder, _ = bert
    whole = json.loads((folder / "tokenizer.json").read_text())
    for change, message in [
        ({"normalizer": {"type": "Lowercase"}}, "the normalizer is Lowercase, not BERT's"),
        ({"model": {**whole["model"], "max_input_chars_per_word": 9}}, "max_input_chars_per_word is 9, not 100"),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "the pre_tokenizer is WhitespaceSplit, not BERT's"),
    ]:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, **change}))
        with pytest.raises(UserError, match=message):
            tokenizer_files.read(tmp_path)
