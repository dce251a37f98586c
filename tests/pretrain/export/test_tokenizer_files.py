"""Directories with published tokenizers are imported, adapted, trained and exported: ids and logits stay."""

import functools
import shutil

import pytest
import torch
import transformers
from typer.testing import CliRunner

from data_pipeline.corpus import open_corpus
from pretrain import cli
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import answer_texts, input_ids
from pretrain.run.world import World
from pretrain.tools.evaluate import Session
from tests.conftest import write_c4, write_corpus_file
from tests.support.in_process import done_here
from tests.support.published_tokenizers import ODD
from tests.support.reading import c4_pages
from tests.support.runs import losses, run_file, train_ranks
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
