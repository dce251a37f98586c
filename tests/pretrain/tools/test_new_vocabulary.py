"""A model gets another vocabulary: which old rows each new row starts from, and what stays as it was."""

import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers import models as library

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.bpe import BPEConfig
from data_pipeline.corpus.tokenizer.byt5 import Bytes
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePieceConfig
from data_pipeline.corpus.tokenizer.symbols import Symbols, SymbolsConfig
from data_pipeline.corpus.tokenizer.text_model import Roles, TextModel
from data_pipeline.corpus.tokenizer.tokenizer_json import TokenizerJson, normal
from data_pipeline.text.vocabulary import Vocabulary
from pretrain import export as huggingface
from pretrain.config.run_config import RunConfig
from pretrain.engine.checkpoint.trained import TrainedModel, save_weights
from pretrain.models import build, parse
from pretrain.run.world import World
from pretrain.tools import new_vocabulary
from pretrain.tools.new_vocabulary import DRAWN, MEAN, PADDING, ROLE, SHARED, Row, renewed, rows_of
from pretrain.training.prepare import prepare
from tests.conftest import built_once
from tests.support.exported import randomise
from tests.support.in_process import done_here, refused_here
from tests.support.reading import c4_pages
from tests.support.runs import run_file
from tests.support.small_families import FAMILIES
from tests.support.tables import each

WORDS = r"\w+|[^\w\s]"


@pytest.fixture(scope="session")
def kinds() -> dict[str, TextModel]:
    """A model of each kind, trained on some pages in English."""
    sample = [page.encode() for page in c4_pages()[:60]]
    pieces = tokenizers.Tokenizer(library.WordPiece(unk_token="[UNK]"))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[SEP]", "[CLS]", "[MASK]"]
    special = [AddedToken(name, normalized=False) for name in names]
    pieces.train_from_iterator(
        c4_pages()[:60], trainers.WordPieceTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    roles = Roles(pad=0, unk=1, eos=2, bos=3, mask=4)
    return {
        "sentencepiece": SentencePieceConfig(vocab_size=600, byte_fallback=True).train(sample),
        "sentencepiece, identity": SentencePieceConfig(vocab_size=700, normalization="identity").train(sample),
        "bytes": Bytes(),
        "characters": SymbolsConfig().train(sample),
        "words": SymbolsConfig(pattern=WORDS, vocab_size=500).train(sample),
        "bpe": BPEConfig(vocab_size=500).train(sample),
        "tokenizer_json": TokenizerJson(normal(pieces, roles, "here"), {}, roles, "here"),
    }


KINDS = ("sentencepiece", "sentencepiece, identity", "bytes", "characters", "words", "bpe", "tokenizer_json")


# Which old rows


def test_special_tokens_and_sentinels_are_mapped_by_role():
    """Ids of bytes: 259 … 263 are the sentinels, from 0 on, then the special tokens. Those of symbols: the special
    tokens at 6, then the sentinels, the last of which is <extra_id_0>."""
    old = Tokenizer(Bytes(), ["[R]", "<s>", "<mask>"], 5)
    new = Tokenizer(Symbols(".", "abc"), ["<mask>", "[S]", "[R]", "<s>"], 7)
    rows = rows_of(old, new, old.size, new.size, mean=True)
    by_role = {0: 0, 1: 1, 2: 2, 6: 266, 8: 264, 9: 265, **{16 - number: 259 + number for number in range(5)}}
    assert {id_: row.old for id_, row in enumerate(rows) if row.sort == ROLE} == {
        id_: (there,) for id_, there in by_role.items()
    }
    assert [id_ for id_, row in enumerate(rows) if row == Row(DRAWN)] == [7, 10, 11]  # [S], and two more sentinels
    assert [row.old for row in rows[3:6]] == [(ord(letter) + 3,) for letter in "abc"]


def test_a_new_bos_starts_as_the_token_that_the_decoder_started_from():
    old, new = Tokenizer(Bytes()), Tokenizer(Bytes(), ["<s>"])
    assert rows_of(old, new, old.size, new.size, mean=True)[new.vocabulary.bos] == Row(ROLE, (old.vocabulary.eos,))


def as_read(content: bytes) -> str:
    """Without spaces, and in the form of NFKC, as T5's sentencepiece has it: kinds differ in both."""
    text = unicodedata.normalize("NFKC", content.decode(errors="surrogateescape"))
    return text.replace(" ", "").replace("\ufffd", "")


@each("there", KINDS)
@each("here", KINDS)
def test_the_old_tokens_of_a_new_one_spell_its_text(here, there, kinds):
    old, new = Tokenizer(kinds[here], sentinels=3), Tokenizer(kinds[there], sentinels=3)
    old_bytes, new_bytes = old.model.token_bytes, new.model.token_bytes
    rows = rows_of(old, new, old.size, new.size, mean=True)
    sorts = Counter(row.sort for row in rows)
    roles = {role for role in ("pad", "eos", "unk", "bos", "mask") if getattr(new.vocabulary, role) is not None}
    assert sorts[ROLE] == 3 + sum(role == "bos" or getattr(old.vocabulary, role) is not None for role in roles)
    found = 0
    for row, content in zip(rows, new_bytes, strict=False):
        if row.sort in (SHARED, MEAN):
            spelled = b"".join(old_bytes[id_] for id_ in row.old)
            assert spelled == content if row.sort == SHARED else as_read(spelled) == as_read(content)
            found += 1
    text = sum(1 for content in new_bytes if content)
    if here == there:
        assert sorts[SHARED] == new.vocab_size - sorts[ROLE] + 3
    elif {here, there} & {"words", "characters", "tokenizer_json"}:  # the others know all bytes
        assert found > 0.1 * text
    else:
        assert found == text
    for row, other in zip(rows, rows_of(old, new, old.size, new.size, mean=False), strict=True):
        assert other == (Row(DRAWN) if row.sort == MEAN else row)


def test_an_unknown_part_leaves_a_token_to_be_drawn():
    """Words have a space before them."""
    old = Tokenizer(Symbols(".", "helo "))
    new = Tokenizer(Symbols(r"\w+", ["hello", "hexo", "ole"]))
    rows = rows_of(old, new, old.size, new.size, mean=True)
    assert rows[3:] == [Row(MEAN, (7, 3, 4, 5, 5, 6)), Row(DRAWN), Row(MEAN, (7, 6, 5, 4))]


class Codes(TextModel):
    """Tokens without text: `vocabulary.texts` is empty."""

    kind = "codes"
    size = 18
    sha256 = "codes"
    vocabulary = Vocabulary(18, (2, 18), pad=0, eos=1, unk=None)

    def has(self, token):
        return False


def test_tokens_without_text_are_drawn():
    old, new = Tokenizer(Bytes(), sentinels=2), Tokenizer(Codes(), sentinels=2)
    with pytest.raises(UserError, match=r"the kind codes have no text .*; --new-rows random draws their rows"):
        rows_of(old, new, old.size, new.size, mean=True)
    rows = rows_of(old, new, old.size, new.size, mean=False)
    assert [row.sort for row in rows] == [ROLE] * 2 + [DRAWN] * 16 + [ROLE] * 2


def test_rows_that_pad_the_vocabulary_follow_each_other():
    old, new = Tokenizer(Bytes()), Tokenizer(Symbols(".", "ab"))
    assert (
        rows_of(old, new, 262, 10, mean=True)[5:]
        == [Row(PADDING, (row,)) for row in (259, 260, 261)] + [Row(PADDING)] * 2
    )


# Their values


def test_a_row_is_copied_or_the_mean_of_rows_or_drawn_like_text():
    torch.manual_seed(0)
    old = 3 + torch.tensor([0.5, 2.0]) * torch.randn(2000, 2)
    old[:3] = 1e6  # these aren't text
    rows = [Row(SHARED, (5,)), Row(MEAN, (7, 3, 7)), Row(ROLE, (0,)), *[Row(DRAWN)] * 4000]

    def made(tensor, seed=0):
        return renewed(tensor, rows, (3, 2000), torch.Generator().manual_seed(seed))

    new = made(old)
    assert torch.equal(new[[0, 2]], old[[5, 0]])
    torch.testing.assert_close(new[1].double(), old[[7, 3, 7]].double().mean(dim=0))
    assert new[3:].mean(dim=0).tolist() == pytest.approx([3, 3], abs=0.15)
    assert new[3:].std(dim=0).tolist() == pytest.approx([0.5, 2.0], rel=0.05)
    assert torch.equal(new, made(old))
    assert not torch.equal(new[3:], made(old, seed=1)[3:])
    assert made(old[:, 0]).shape == (4003,)


MATRICES = {
    "t5": ["embedding.weight", "lm_head.weight"],
    "bart": ["embedding.weight", "lm_head.final_logits_bias"],
    "vanilla": ["embedding.weight"],
    "t5gemma": ["embedding.weight", "lm_head.weight"],
    "t5gemma2": ["embedding.weight"],
    "autoregressive": ["embedding.weight"],
    "double_decoder": ["embedding.weight"],
    "decoder_only": ["embedding.weight"],
    "encoder_only": ["embedding.weight", "lm_head.bias"],
}


def saved(family, corpus: Path, out: Path, **changes):
    """A model with random weights and the corpus's tokenizer, in the checkpoint `out`."""
    tokenizer = open_corpus(corpus).tokenizer
    vocabulary = tokenizer.vocabulary
    ids = {"vocab_size": tokenizer.size, "pad_id": vocabulary.pad, "eos_id": vocabulary.eos}
    model = randomise(build(parse({**FAMILIES[family], **ids, **changes})))
    for buffer in model.buffers():
        buffer.normal_()
    save_weights(model.config, model.state_dict(), tokenizer, out)
    return TrainedModel.open(out)


@each("family", FAMILIES)
def test_an_unchanged_vocabulary_changes_no_bit(family, small_corpus, tmp_path):
    before = saved(family, small_corpus, tmp_path / "start", pad_vocab_to_multiple_of=96)
    new_vocabulary.adapt(tmp_path / "start", tmp_path / "out", str(small_corpus), "mean", 0)
    after = TrainedModel.open(tmp_path / "out")
    assert after.model.config == before.model.config
    assert after.tokenizer.describe() == before.tokenizer.describe()
    state = after.model.state_dict()
    assert state.keys() == before.model.state_dict().keys()
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(state[name].view(torch.int32), tensor.view(torch.int32)), name
    assert sorted(new_vocabulary.of_tokens(before.model.config)) == sorted(MATRICES[family])


@pytest.fixture(scope="session")
def other_corpus() -> Path:
    """The small corpus with byte-level BPE of 400 tokens, a mask, and more sentinels."""
    tokenizer = {"kind": "bpe", "vocab_size": 400, "special_tokens": ["<mask>"], "sentinels": 30}
    return built_once("other_vocabulary", parts=1, tokenizer=tokenizer)


@each("tied", [True, False])
def test_a_run_starts_from_a_model_with_another_vocabulary(tied, small_corpus, other_corpus, tmp_path):
    """The report counts each row once. Other weights stay."""
    before = saved("t5", small_corpus, tmp_path / "start", tie_embeddings=tied, pad_vocab_to_multiple_of=128)
    told = done_here("pretrain", "adapt", tmp_path / "start", tmp_path / "out", "--tokenizer", other_corpus)
    after = TrainedModel.open(tmp_path / "out")
    old, new = before.tokenizer, after.tokenizer
    assert new.describe() == open_corpus(other_corpus).tokenizer.describe()
    config = after.model.config
    assert (config.vocab_size, config.padded_vocab_size, config.pad_id, config.eos_id) == (431, 512, 0, 1)
    state, theirs = after.model.state_dict(), before.model.state_dict()
    matrices = ["embedding.weight"] if tied else ["embedding.weight", "lm_head.weight"]
    for name in theirs.keys() - {"embedding.weight", "lm_head.weight"}:
        assert torch.equal(state[name], theirs[name])
    rows = rows_of(old, new, before.model.config.padded_vocab_size, 512, mean=True)
    for name in matrices:
        for row, values in zip(rows, state[name], strict=True):
            if row.old:
                expected = sum(theirs[name][id_].double() for id_ in row.old) / len(row.old)
                torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-7)
    first, *lines, left, _ = told.splitlines()
    assert first == f"512 rows instead of {before.model.config.padded_vocab_size} in {', '.join(matrices)}:"
    assert [int(line.split()[0]) for line in lines] == [
        count for sort in (SHARED, ROLE, MEAN, DRAWN, PADDING) if (count := Counter(row.sort for row in rows)[sort])
    ]
    used = {id_ for row in rows for id_ in row.old}
    assert int(left.split()[0]) == before.model.config.padded_vocab_size - len(used)

    model = yaml.safe_load((tmp_path / "out/model.yaml").read_text())["model"]
    path = run_file(tmp_path, other_corpus, model=model, checkpoint={"init_from": str(tmp_path / "out")})
    prepare(RunConfig.model_validate_json(path.read_text()), World.on_this_node())  # isn't refused


def test_a_directory_that_transformers_saved_is_adapted_like_the_checkpoint(small_corpus, other_corpus, tmp_path):
    before = saved("bart", small_corpus, tmp_path / "start")
    huggingface.export(before.model.state_dict(), before.model.config, before.tokenizer, tmp_path / "exported")
    for source in ("start", "exported"):
        new_vocabulary.adapt(tmp_path / source, tmp_path / f"{source}-out", str(other_corpus), "mean", 0)
    states = [TrainedModel.open(tmp_path / f"{source}-out").model.state_dict() for source in ("start", "exported")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_large_unit_of_padding_does_not_outlive_the_vocabulary(small_corpus, other_corpus, tmp_path):
    """An import may need a unit as large as its matrix."""
    saved("t5", small_corpus, tmp_path / "start", pad_vocab_to_multiple_of=30_011)
    new_vocabulary.adapt(tmp_path / "start", tmp_path / "out", str(other_corpus), "mean", 0)
    assert TrainedModel.open(tmp_path / "out").model.config.padded_vocab_size == 512


def test_refusals_of_another_tokenizer_name_the_command(small_corpus, other_corpus, tmp_path):
    saved("t5", small_corpus, tmp_path / "start")
    model = {key: value for key, value in FAMILIES["t5"].items() if key != "vocab_size"}
    path = run_file(tmp_path, other_corpus, model=model, checkpoint={"init_from": str(tmp_path / "start")})
    command = f"pretrain adapt {tmp_path}/start OUT --tokenizer {other_corpus}"
    with pytest.raises(UserError, match=f"built with another tokenizer than {other_corpus}: .*`{command}`"):
        prepare(RunConfig.model_validate_json(path.read_text()), World.on_this_node())
    line = refused_here(2, "pretrain", "evaluate", tmp_path / "start", "--corpus", other_corpus)
    assert f"`pretrain adapt CHECKPOINT OUT --tokenizer {other_corpus}`" in line


def test_wrong_arguments_get_one_line(small_corpus, tmp_path):
    saved("t5", small_corpus, tmp_path / "start")
    corpus, out = ["--tokenizer", small_corpus], tmp_path / "out"
    for options, expected in (
        ([], "adapt: give --style for an encoder-decoder, or --tokenizer for another vocabulary"),
        ([*corpus, "--style", "modern"], "adapt: give --style"),
        ([*corpus, "--sentinels", "5"], "--sentinels: for --style"),
        (["--style", "modern", "--new-rows", "mean"], "--new-rows: for --tokenizer"),
        ([*corpus, "--new-rows", "zero"], "--new-rows: expected mean or random, got 'zero'"),
        (["--tokenizer", tmp_path / "none"], f"{tmp_path}/none"),
    ):
        assert expected in refused_here(2, "pretrain", "adapt", tmp_path / "start", out, *options)
    assert not out.exists()
    assert "exists already" in refused_here(2, "pretrain", "adapt", tmp_path / "start", tmp_path / "start", *corpus)
