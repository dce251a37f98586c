"""Imports what transformers 5 saves: files of weights, tied matrices, tokenizers."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.tokenizer import load, save
from data_pipeline.tokenizer.byte_level_bpe import ByteLevelBPE
from data_pipeline.tokenizer.sentencepiece import SentencePiece
from data_pipeline.tokenizer.wordpiece import WordPiece
from pretrain.checkpoint.trained import TrainedModel
from pretrain.huggingface import export, import_, load_state, tokenizer_files
from tests.pretrain.exported import randomise
from tests.slow import slow
from tests.tables import each

transformers = pytest.importorskip("transformers")

LICENSE = Path(__file__).parents[2] / "LICENSE"
TEXTS = [
    *LICENSE.read_text(encoding="utf-8").splitlines(),
    'You may add Your own "copyright" statement;  two  spaces\tand a tab.',
    "Naïve façades of Ångström: ½ of the ﬁnal ＷＩＤＥ text, 日本語 too.",
    " \n ",
]
PIECES = 300
INDEX = "model.safetensors.index.json"


def t5(vocab_size=400):
    """A T5 with random weights."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return randomise(transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=vocab_size, **sizes)))


@pytest.fixture
def t5_tokenizer(spiece):
    return transformers.T5Tokenizer.from_pretrained(spiece.parent)


# ---- files of weights


def test_a_variant_beside_the_model_is_passed_over(tmp_path):
    model = t5()
    model.save_pretrained(tmp_path)
    _, expected = load_state(tmp_path)
    with torch.no_grad():
        model.shared.weight.zero_()
    model.save_pretrained(tmp_path, variant="ema")  # model.ema.safetensors
    model.save_pretrained(tmp_path / "a", variant="z", max_shard_size="20KB")
    for path in (tmp_path / "a").glob("*.safetensors*"):
        path.rename(tmp_path / path.name)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    _, found = load_state(tmp_path)
    assert torch.equal(found["embedding.weight"], theirs.shared.weight)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"expected model\.safetensors or .*index\.json, found model\.ema\.safetensors"):
        load_state(tmp_path)


def test_shards_are_those_of_the_index(tmp_path):
    t5().save_pretrained(tmp_path / "whole")
    _, expected = load_state(tmp_path / "whole")
    saved = tmp_path / "sharded"
    t5().save_pretrained(saved, max_shard_size="20KB")
    shutil.copy(tmp_path / "whole/model.safetensors", saved / "model-00009-of-00009.safetensors")  # of an older save
    _, found = load_state(saved)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    index = json.loads((saved / INDEX).read_text())
    (name, file), *_ = index["weight_map"].items()
    for change, message in [
        ({"weight_map": {**index["weight_map"], name: "../whole/model.safetensors"}}, "not in a .* file beside it"),
        ({"weight_map": {**index["weight_map"], "more.weight": file}}, "holds other tensors than .*: more.weight"),
        ({"weight_map": [name]}, "expected weight_map"),
        ({}, "expected weight_map"),
    ]:
        (saved / INDEX).write_text(json.dumps(change))
        with pytest.raises(FailedError, match=message):
            load_state(saved)


@each(
    "name, content, message",
    [
        ("generation_config.json", '{"decoder_start_token_id": 5}', "is 5, but our t5 starts from padding, 0"),
        ("adapter_config.json", "{}", "weights in an adapter can't be imported"),
        ("config.json", "{", "damaged: Invalid JSON"),
        ("config.json", "[]", "damaged: Input should be"),
        ("model.safetensors", None, r"found pytorch_model\.bin\. .*may run code"),
    ],
)
def test_what_runs_code_needs_another_file_or_is_damaged_is_refused_in_a_line(name, content, message, tmp_path):
    t5().save_pretrained(tmp_path)
    if content is None:
        (tmp_path / name).rename(tmp_path / "pytorch_model.bin")
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises((UserError, FailedError), match=message) as refused:
        load_state(tmp_path)
    assert content is None or str(refused.value).startswith(f"{tmp_path}/{name}: ")
    assert "\n" not in str(refused.value)


# ---- tokenizers


@each("sentinels", [0, 50, 100, 200])
def test_a_t5_that_transformers_saved_is_imported_with_its_sentinels(sentinels, spiece, tmp_path):
    """transformers 5 writes only tokenizer.json of the tokenizer; 512 rows are more than any tokenizer here needs."""
    theirs = transformers.T5Tokenizer.from_pretrained(spiece.parent, extra_ids=sentinels)
    t5(vocab_size=512).save_pretrained(tmp_path / "saved")
    theirs.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved/spiece.model").exists()
    config = import_(tmp_path / "saved", tmp_path / "imported")
    assert (config.vocab_size, config.padded_vocab_size) == (PIECES + sentinels, 512)
    ours = TrainedModel.open(tmp_path / "imported").tokenizer
    assert (ours.vocab_size, ours.special_tokens, ours.sentinels) == (PIECES, (), sentinels)
    ids = ours.encode(TEXTS)
    assert ids == [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert ids == SentencePiece.read(spiece).encode(TEXTS)
    assert list(map(ours.decode, ids)) == list(map(SentencePiece.read(spiece).decode, ids))
    if sentinels:
        text = "Subject to the <extra_id_0> of this License, each <extra_id_1> hereby grants"
        assert ours.encode_with_sentinels(text) == theirs(text).input_ids


@each("sentinels", [None, 0, 50, 200])
def test_a_spiece_model_has_as_many_sentinels_as_its_config_says(sentinels, spiece, tmp_path):
    """The first T5s don't list theirs: there are 100."""
    shutil.copy(spiece, tmp_path)
    if sentinels is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": sentinels}))
    ours = tokenizer_files.read(tmp_path)
    theirs = transformers.T5Tokenizer.from_pretrained(tmp_path)
    assert (ours.size, ours.sentinels) == (len(theirs), 100 if sentinels is None else sentinels)
    if ours.sentinels:
        assert theirs.convert_tokens_to_ids("<extra_id_0>") == ours.vocabulary.first_sentinel


def test_two_tokenizers_in_a_directory_are_refused(spiece, t5_tokenizer, tmp_path):
    t5_tokenizer.save_pretrained(tmp_path)
    shutil.copy(spiece, tmp_path)
    assert tokenizer_files.read(tmp_path).sha256 == SentencePiece.read(spiece).sha256  # the file as it is
    saved = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(saved.replace('"▁the"', '"▁tha"'))
    with pytest.raises(UserError, match=r"spiece\.model and tokenizer\.json are two different tokenizers"):
        tokenizer_files.read(tmp_path)


@each("kind", slow("gpt2", "bart", "roberta"))
def test_byte_level_bpe_that_transformers_saved_is_read(kind, byte_level_bpe, tmp_path):
    ours = ByteLevelBPE.read(byte_level_bpe / kind.replace("roberta", "bart"))
    (tmp_path / "files").mkdir()
    for name, content in ours.files.items():
        (tmp_path / "files" / name).write_bytes(content)
    names = {"gpt2": "GPT2TokenizerFast", "bart": "BartTokenizer", "roberta": "RobertaTokenizer"}
    cls = getattr(transformers, names[kind])
    theirs = cls.from_pretrained(tmp_path / "files")
    theirs.save_pretrained(tmp_path / "saved")
    found = tokenizer_files.read(tmp_path / "saved")
    assert found.sha256 == ours.sha256
    assert found.encode(TEXTS) == [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    theirs = cls.from_pretrained(tmp_path / "files", add_prefix_space=True)
    theirs.save_pretrained(tmp_path / "prefixed")
    expected = [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert expected != found.encode(TEXTS)
    assert tokenizer_files.read(tmp_path / "prefixed").encode(TEXTS) == expected


def test_other_tokenizers_are_refused_by_name(t5_tokenizer, bert, tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    (tmp_path / "words").mkdir()
    words.save(str(tmp_path / "words/tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json: a tokenizer of kind WordLevel"):
        tokenizer_files.read(tmp_path / "words")
    t5_tokenizer.save_pretrained(tmp_path / "t5")
    path = tmp_path / "t5/tokenizer.json"
    whole, of_bert = (json.loads(one.read_text()) for one in (path, bert[0] / "tokenizer.json"))
    lower = {"type": "Sequence", "normalizers": [whole["normalizer"], {"type": "Lowercase"}]}
    words_alone = {"type": "WhitespaceSplit"}
    for saved, change, message in [
        (whole, {"normalizer": lower}, "the normalizer is Sequence"),
        (whole, {"pre_tokenizer": words_alone}, "the pre_tokenizer is not T5's"),
        (whole, {"model": {**whole["model"], "unk_id": 7}}, "unk_id is 7, not 2"),
        (of_bert, {"normalizer": {"type": "Lowercase"}}, "the normalizer is Lowercase, not BERT's"),
        (of_bert, {"model": {**of_bert["model"], "max_input_chars_per_word": 9}}, "chars_per_word is 9, not 100"),
        (of_bert, {"pre_tokenizer": words_alone}, "the pre_tokenizer is WhitespaceSplit, not BERT's"),
    ]:
        path.write_text(json.dumps({**saved, **change}))
        with pytest.raises(UserError, match=message):
            tokenizer_files.read(tmp_path / "t5")
    for content in (json.dumps({**whole, "model": {"type": "Unigram", "vocab": 3}}), "{"):
        path.write_text(content)
        with pytest.raises(FailedError, match=r"tokenizer\.json: damaged: "):
            tokenizer_files.read(tmp_path / "t5")
    path.unlink()
    with pytest.raises(UserError, match=r"no supported tokenizer: neither spiece\.model, nor"):
        tokenizer_files.read(tmp_path / "t5")


# BERT with its WordPiece tokenizer


WORDPIECE_TEXTS = [*TEXTS, "Other texts have [SEP] [MASK]x", "w" * 101, ""]
MARKS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
SIZES |= {"max_position_embeddings": 42}


def vocabulary():
    """Marks, all characters of the texts as beginnings and continuations, and the words of the licence."""
    text = "\n".join(WORDPIECE_TEXTS)
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
    plain = [text.replace("[SEP] [MASK]", "") for text in WORDPIECE_TEXTS]  # their marks match text, ours never do
    assert ours.encode(plain) == [theirs(text, add_special_tokens=False).input_ids for text in plain]
    marks = {ours.vocabulary.bos, ours.vocabulary.eos, ours.vocabulary.mask}
    assert not marks & {id_ for ids in ours.encode(WORDPIECE_TEXTS) for id_ in ids}
    assert ours.decode(ours.encode(["You may add, your own."])[0]).lower() == "you may add, your own."
    assert (ours.vocabulary.pad, ours.vocabulary.unk, ours.vocabulary.text[0]) == (0, 2, 6)
    assert not ours.vocabulary.word_starts[ours.model._ids["##ing"]]
    save(ours, tmp_path / "kept")
    assert load(tmp_path / "kept").describe() == ours.describe()


def test_googles_list_of_tokens_is_enough(tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary()), encoding="utf-8")
    theirs = transformers.BertTokenizer(vocab=vocabulary())
    found = tokenizer_files.read(tmp_path)
    assert found.encode(WORDPIECE_TEXTS[:20]) == [
        theirs(text, add_special_tokens=False).input_ids for text in WORDPIECE_TEXTS[:20]
    ]
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
    for text in WORDPIECE_TEXTS[:30]:
        assert again(text).input_ids == tokenizer(text).input_ids
    pair = again("a text", "and another", return_token_type_ids=True)
    assert pair.input_ids == tokenizer("a text", "and another").input_ids
    assert (again.cls_token, again.sep_token, again.mask_token) == ("[CLS]", "[SEP]", "[MASK]")
    assert tokenizer_files.read(tmp_path / "out").describe() == trained.tokenizer.describe()
