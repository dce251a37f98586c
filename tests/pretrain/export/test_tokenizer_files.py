"""Directories with published tokenizers are imported, adapted, trained and exported: ids and logits stay. Exported
tokenizers have the same ids in transformers."""

import functools
import io
import shutil
from dataclasses import replace

import pytest
import sentencepiece
import torch
import transformers
from typer.testing import CliRunner

from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer, tokenizer_json
from data_pipeline.corpus.tokenizer.ids import Ids
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain import cli
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import answer_texts, input_ids
from pretrain.export import card, tokenizer_files
from pretrain.export.card import Lineage
from pretrain.models.state_dict_adapter import hf_models
from pretrain.run.world import World
from pretrain.tools.evaluate import Session
from tests.conftest import write_c4, write_corpus_file
from tests.data_pipeline.corpus.test_tokenizer import KEPT
from tests.pretrain.export.test_load import TEXTS as SHORT_TEXTS
from tests.support.in_process import done_here
from tests.support.published_tokenizers import ODD
from tests.support.reading import c4_pages
from tests.support.runs import losses, run_file, train_ranks
from tests.support.slow import slow
from tests.support.small_exports import tokenizer_of
from tests.support.small_models import as_at_the_start
from tests.support.tables import each

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
WINDOWS = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# model: (its tokenizer, its class, rows of the matrix beside the tokenizer's ids, settings)
MODELS = {
    "Llama 3": ("Llama 3", "Llama", 0, {"eos_token_id": [701, 703], "bos_token_id": 700}),
    "Qwen3": ("Qwen3", "Qwen3", 37, {"head_dim": 8, "eos_token_id": 702, "bos_token_id": 700}),
    "Gemma 2": ("Gemma", "Gemma2", 3, WINDOWS),
    "Gemma 3": ("Gemma", "Gemma3", -1, WINDOWS),
    "TinyLlama": ("Llama 2", "Llama", 0, {}),
}
STYLES = {"Llama 3": "modern", "Qwen3": "modern", "Gemma 2": "t5gemma", "Gemma 3": "t5gemma2", "TinyLlama": "modern"}
TEXTS = [*c4_pages()[:3], *ODD[3:]]


def invoke(*arguments):
    done = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert done.exit_code == 0, done.exception
    return done


@pytest.fixture(scope="module")
def saved(published_tokenizers, tmp_path_factory):
    """For the name of a model: the directory that transformers saved, its model, its tokenizer."""

    @functools.cache
    def of(of_model):
        kind, name, spare, settings = MODELS[of_model]
        directory = tmp_path_factory.mktemp("saved") / name
        shutil.copytree(published_tokenizers / kind, directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        settings = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **settings}
        config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
        config = config_class(vocab_size=len(tokenizer) + spare, **SIZES, **settings)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
        model.save_pretrained(directory)
        return directory, model, tokenizer

    return of


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


@each("name", MODELS)
@torch.no_grad()
def test_an_import_and_its_export_have_the_ids_and_logits_of_transformers(name, saved, tmp_path):
    directory, model, tokenizer = saved(name)
    told = invoke("import", directory, tmp_path / "start").output
    ours = TrainedModel.open(tmp_path / "start")
    rows = model.config.vocab_size
    assert (ours.tokenizer.size, ours.model.config.padded_vocab_size) == (min(len(tokenizer), rows), rows)
    assert ("left out: <image_soft_token>" in told) == (name == "Gemma 3")
    assert ("no file names a token for padding" in told) == (name in ("Llama 3", "TinyLlama"))
    assert ("end texts with <|eot_id|> (703) too" in told) == (name == "Llama 3")
    invoke("export", tmp_path / "start", tmp_path / "exported")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    for text in TEXTS:
        ids = ids_of(tokenizer, text)
        assert ours.tokenizer.encode([text]) == [ids] == [ids_of(theirs, text)]
        assert theirs(text).input_ids == tokenizer(text).input_ids  # with BOS, where there is one
        assert input_ids(ours, text) == (tokenizer(text).input_ids or [tokenizer.eos_token_id])
        inputs = torch.tensor([ids[:200]])
        expected = model(inputs).logits
        assert expected.std() > 0.1
        largest = expected.abs().max()
        assert (ours.model.decode(inputs) - expected).abs().max() < 1e-5 * largest
        assert (again.eval()(inputs).logits - expected).abs().max() < 1e-5 * largest
    begin = tokenizer("").input_ids
    assert begin == ([] if name == "Qwen3" else [tokenizer.bos_token_id])
    (one,) = answer_texts(ours, ["Hello world"], GenerationSettings(max_new_tokens=1))
    assert one.whole.startswith("Hello world")
    prompt = Session(ours, None, World.on_this_node(), 1).prompt_format(None).prompt([5], [6])
    assert (prompt.prefix, prompt.scored) == ([*begin, 5], [6])
    assert theirs.special_tokens_map == tokenizer.special_tokens_map
    described = ours.tokenizer.describe()
    invoke("import", tmp_path / "exported", tmp_path / "again")
    assert TrainedModel.open(tmp_path / "again").tokenizer.describe() == described


@each("name", MODELS)
def test_an_adapted_model_gets_sentinels_and_its_export_has_them(name, saved, tmp_path, modules_of_transformers):
    directory, model, tokenizer = saved(name)
    invoke("adapt", directory, tmp_path / "start", "--style", STYLES[name], "--sentinels", 100)
    ours = TrainedModel.open(tmp_path / "start")
    pieces = min(len(tokenizer), model.config.vocab_size)
    assert ours.tokenizer.vocabulary.sentinel_ids == range(pieces, pieces + 100)
    assert ours.model.config.padded_vocab_size >= pieces + 100
    matrix = model.get_input_embeddings().weight
    assert torch.equal(ours.model.embedding.weight[:pieces], matrix[:pieces])
    invoke("export", tmp_path / "start", tmp_path / "exported")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    ends = [theirs.eos_token_id]  # the family's mark
    for text in TEXTS:
        assert theirs(text).input_ids == [*ids_of(tokenizer, text), *ends]
    blanks = theirs("Thank you <extra_id_0> me to <extra_id_1>").input_ids
    assert [id_ for id_ in blanks if id_ >= pieces] == [pieces + 99, pieces + 98]
    assert blanks == ours.tokenizer.encode_with_sentinels("Thank you <extra_id_0> me to <extra_id_1>")
    described = invoke("import", tmp_path / "exported", tmp_path / "again").output
    assert f"{pieces + 100:,} ids" in described
    assert TrainedModel.open(tmp_path / "again").tokenizer.sentinels == 100


def test_an_adapted_model_trains_evaluates_and_generates_on_a_corpus_of_the_same_directory(saved, tmp_path):
    directory, _, _ = saved("Gemma 2")
    invoke("adapt", directory, tmp_path / "start", "--style", "t5gemma", "--sentinels", 20)
    write_c4(tmp_path / "c4.json.gz", records=40)
    tokenizer = {"kind": "tokenizer_json", "path": str(directory / "tokenizer.json"), "sentinels": 20}
    done_here("data-pipeline", "build", write_corpus_file(tmp_path / "corpus.yaml", tokenizer=tokenizer))
    assert open_corpus(tmp_path / "corpus").tokenizer.sha256 == TrainedModel.open(tmp_path / "start").tokenizer.sha256
    path = run_file(
        tmp_path,
        tmp_path / "corpus",
        run={"max_steps": 3},
        batch={"global_batch_size": 8, "micro_batch_size": 8},
        evaluation=[],
        extends=[str(tmp_path / "start/model.yaml")],
        model={},
        checkpoint={"init_from": str(tmp_path / "start")},
    )
    assert train_ranks(path, 1) == [0]
    assert losses(path)[3] < losses(path)[1]
    invoke("evaluate", tmp_path / "start", "--corpus", tmp_path / "corpus", "--hook", "validation_loss")
    invoke("generate", tmp_path / "start", "Thank you <extra_id_0> me", "--max-new-tokens", 3)


BYTES = 285  # pieces of `with_bytes`


@each(
    "family, objective, special, sentinels, mask",
    [
        ("t5", "span_corruption", (), 20, "<extra_id_0>"),
        ("t5gemma2", "span_corruption", ("<mask>", "<s>"), 20, "<extra_id_0>"),
        ("t5gemma2", None, (), 20, "<extra_id_0>"),
        ("bart", "denoising", ("<mask>", "<s>"), 20, "<mask>"),
        ("bart", None, ("<mask>", "<s>"), 20, "<mask>"),
        ("t5", "prefix_lm", (), 0, None),
    ],
)
def test_the_mask_token_is_the_blank_that_the_model_has_learnt_to_fill(
    family, objective, special, sentinels, mask, spiece, tmp_path
):
    ours = tokenizer_of(spiece, sentinels, special)
    tokenizer_files.write(ours, hf_models(family)[0], objective, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.mask_token == mask
    if mask:
        text = theirs("Subject to the " + mask + " of this License", add_special_tokens=False).input_ids
        assert text.count(theirs.mask_token_id) == 1
        expected = ours.vocabulary.first_sentinel if mask == "<extra_id_0>" else ours.vocabulary.mask
        assert theirs.mask_token_id == expected
    assert same(tokenizer_files.read(tmp_path), ours)


@each(
    "family, objective, begins, ends",
    [
        ("bart", None, True, True),
        ("bart", "denoising", True, True),
        ("bart", "text_to_text", False, True),
        ("encoder_only", "masked_lm", True, True),
        ("decoder_only", "causal_lm", False, False),
        ("decoder_only", "in_one_row", False, True),
    ],
)
def test_an_exported_tokenizer_puts_the_marks_of_training_around_a_text(
    family, objective, begins, ends, bart_tokenizer, tmp_path
):
    """And the card does so around ids."""
    tokenizer_files.write(bart_tokenizer, hf_models(family)[0], objective, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocabulary, (ids,) = bart_tokenizer.vocabulary, bart_tokenizer.encode("the License")
    assert theirs("the License").input_ids == [*[vocabulary.bos] * begins, *ids, *[vocabulary.eos] * ends]
    of_ids, config = Tokenizer(Ids(9), ["<s>"]), as_at_the_start({"encoder_only": "bert"}.get(family, family)).config
    page = card.page(Lineage(objective=objective), config, hf_models(family)[0], of_ids)
    assert f"torch.tensor([{[*[11] * begins, 0, 1, 2, *[10] * ends]}])" in page


def same(one, other):
    """Whether two tokenizers give the same ids. What an export's tokenizer.json puts around a text decides none."""
    alike = {"files": {}} if other.model.kind == "tokenizer_json" else {}
    return one.sha256 == other.sha256 and replace(one.describe(), **alike) == replace(other.describe(), **alike)


SPECIAL = ("<s>", "[R]", "<mask>")
INSIDE = (
    "the <extra_id_0> of this License, each <extra_id_1> grants.",
    "MKT<extra_id_0>AY<extra_id_1>, the <extra_id_2>",
)
UNCHANGED = {
    "normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True, "user_defined_symbols": ["\n", "\r", "\t"],
}  # fmt: skip
OF_PIECES, OF_BART = {"pad": 0, "eos": 1, "unk": 2}, {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 50_264}


@each(
    "kind, family, special, sentinels, marks",
    [
        ("pieces", "t5", (), 100, OF_PIECES),
        ("pieces", "t5", (), 20, OF_PIECES),
        ("pieces", "t5", SPECIAL, 20, {**OF_PIECES, "bos": 300, "mask": 302}),
        ("pieces", "bart", SPECIAL, 20, {**OF_PIECES, "bos": 300, "mask": 302}),
        ("pieces with bytes", "t5", (), 20, OF_PIECES),
        ("pieces as they are", "t5", (), 20, OF_PIECES),
        ("pieces as they are", "bart", SPECIAL, 20, {**OF_PIECES, "bos": BYTES, "mask": BYTES + 2}),
        ("bart", "t5", ("[R]",), 20, OF_BART),
        *slow(
            ("bart", "bart", ("[R]",), 20, OF_BART),
            ("bart", "t5", (), 0, OF_BART),
            ("gpt2", "t5", (), 0, {"bos": 50_256, "eos": 50_256, "pad": 50_256}),
        ),
    ],
)
def test_an_exported_tokenizer_has_the_same_ids_in_transformers_and_back(
    kind, family, special, sentinels, marks, spiece, byte_level_bpe, tmp_path
):
    texts = [*SHORT_TEXTS, ""]
    if kind == "pieces":
        model = SentencePiece.read(spiece)
    elif kind == "pieces as they are":
        model, texts = with_bytes(**UNCHANGED), [*SHORT_TEXTS, *KEPT, "the Queen ☃ and 東京  ", "a <0x41> \ne\u0301"]
    elif kind == "pieces with bytes":
        model, texts = with_bytes(), ["the Queen ☃ and 東京", "🙂🙂 cat", "a <0x41> <0xE6>", "<0x4", "\u00e9 Ω the"]
    else:
        model = tokenizer_json.read(byte_level_bpe / kind)
    ours = Tokenizer(model, special, sentinels)
    tokenizer_files.write(ours, hf_models(family)[0], None, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert same(tokenizer_files.read(tmp_path), ours)
    assert len(theirs) == ours.size
    assert {name: getattr(theirs, f"{name}_token_id") for name in marks} == marks
    first = ours.size - sentinels - len(special)
    assert theirs.convert_tokens_to_ids(special) == list(range(first, first + len(special)))
    names = [f"<extra_id_{number}>" for number in range(sentinels)]
    assert theirs.convert_tokens_to_ids(names) == [ours.size - 1 - number for number in range(sentinels)]
    begin = [marks["bos"]] if family == "bart" else []
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert theirs(text).input_ids == [*begin, *ids, marks["eos"]]
        assert kind == "pieces" or theirs.decode(ids) == ours.decode(ids) == text
    for text in INSIDE if sentinels else ():
        assert theirs(text).input_ids == [*begin, *ours.encode_with_sentinels(text)]
    if kind == "bart":
        assert theirs("a <mask>", add_special_tokens=False).input_ids == [102, 50_264]  # no space is left over
        assert [theirs(name, add_special_tokens=False).input_ids for name in special] == [[50_265] for _ in special]
        theirs.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved/vocab.json").exists()  # transformers 5 writes tokenizer.json alone
        assert same(tokenizer_files.read(tmp_path / "saved"), ours)
    if model.kind == "sentencepiece" and model.byte_ids:
        (tmp_path / "spiece.model").unlink()
        without = tokenizer_files.read(tmp_path)
        assert without.encode(texts) == ours.encode(texts)
        assert [*map(without.encode_with_sentinels, INSIDE)] == [*map(ours.encode_with_sentinels, INSIDE)]
        assert (without.model.byte_ids, without.sentinels) == (model.byte_ids, 20)


def with_bytes(**options):
    model, sample = io.BytesIO(), ["the cat sat on the mat.", "King Zog: a <hat> 0x4!"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample), model_writer=model, vocab_size=BYTES if options else 283, byte_fallback=True,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=1, minloglevel=2, **options,
    )  # fmt: skip
    return SentencePiece(model.getvalue(), "bytes")
