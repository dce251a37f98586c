"""Each family as users run it: trained by two ranks at ZeRO stage 2, then generating and exported."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation.config_file import load
from data_pipeline.pipeline import build as build_corpus
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.byte_level_bpe import ByteLevelBPE
from pretrain import cli
from pretrain.checkpoint.trained import TrainedModel
from pretrain.generation.decoding import generate
from pretrain.generation.settings import GenerationSettings
from pretrain.generation.texts import padded
from pretrain.huggingface import export
from pretrain.models import AutoregressiveConfig, build
from pretrain.run.metrics_file import read_metrics
from tests.conftest import write_c4, write_corpus_file
from tests.pretrain.runs import train_ranks
from tests.slow import slow

LENGTH = 64
STACKS = {"d_model": 32, "num_heads": 4, "num_encoder_layers": 1, "num_decoder_layers": 1}
LAYERS = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2, "max_positions": LENGTH}
STACK = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_key_value_heads": 2, "num_layers": 2}
SUBTRACTED = {"subtract_positions": "without_norm", "num_cross_heads": 8}
# family: the corpus it learns from, and the rest of its config
FAMILIES = {
    "t5": ("spans", {**STACKS, "d_kv": 8, "d_ff": 64}),
    "bart": ("noised", {**STACKS, "d_ff": 64, "max_positions": LENGTH}),
    "vanilla": ("noised", {**STACKS, "d_ff": 64}),
    "t5gemma": ("spans", {"encoder": {**STACK, "d_model": 48}, "decoder": STACK, "sliding_window": 20}),
    "t5gemma2": ("spans", STACK),
    "modern": ("spans", {"encoder": STACK, "decoder": {**STACK, "num_layers": 1}, "sliding_window": 20}),
    "autoregressive": ("causal", {**STACKS, "max_positions": LENGTH, **SUBTRACTED}),
    "double_decoder": ("causal", {**STACKS, "d_ff": 64}),
    "decoder_only": ("causal", LAYERS),
    "encoder_only": ("masked", LAYERS),
}
FIRST = ("t5gemma2", "autoregressive")
AUTO_CLASSES = {
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
    "t5gemma": "AutoModelForSeq2SeqLM",
    "t5gemma2": "AutoModelForSeq2SeqLM",
    "modern": "AutoModelForSeq2SeqLM",
    "vanilla": "AutoModelForSeq2SeqLM",
    "autoregressive": "AutoModelForCausalLM",
    "double_decoder": "AutoModelForCausalLM",
    "decoder_only": "AutoModelForCausalLM",
    "encoder_only": "AutoModelForMaskedLM",
}


@pytest.fixture(scope="module")
def corpora(small_corpus, tmp_path_factory):
    """A corpus for each objective, all of the same pages and pieces."""
    folder = tmp_path_factory.mktemp("families")
    write_c4(folder / "c4.json.gz", records=60)
    noised = {"objective": {"name": "denoising", "length": LENGTH}, "packing": "complete_documents"}
    masked = {"objective": {"name": "masked_lm", "length": LENGTH, "next_sentence": True}, "packing": "sentence_pairs"}
    made = {"spans": small_corpus}
    for name, rows, special in (
        ("noised", noised, ["<mask>", "<s>"]),
        ("causal", {"objective": {"name": "causal_lm", "length": LENGTH}}, []),
        ("masked", masked, ["[CLS]", "[SEP]", "<mask>"]),
    ):
        model = str(small_corpus / "tokenizer/spiece.model")
        path = write_corpus_file(
            folder / f"{name}.yaml",
            output=str(folder / name),
            tokenizer={"path": model, "special_tokens": special, "sentinels": 0},
            rows=rows,
        )
        made[name] = build_corpus(load(path, [], CorpusConfig))
    return made


def pretrain(*arguments):
    """Runs a command in this process: starting another takes longer than the command."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("family", [*FIRST, *slow(*(family for family in FAMILIES if family not in FIRST))])
def test_a_family_trains_generates_and_is_exported(family, corpora, tmp_path, modules_of_transformers):
    corpus, sizes = FAMILIES[family]
    data = [{"corpus": str(corpora[corpus])}]
    config = {
        "run": {"name": "test", "directory": str(tmp_path / "run"), "max_steps": 4, "cpu_threads": 1},
        "model": {"family": family, **sizes},
        "data": {"train": data, "validation": data, "lanes": 8, "workers": 0},
        "batch": {"global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-3},
        "precision": "fp32",
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "evaluation": [{"hook": "validation_loss", "every_steps": 4}],
        "tracking": {"mlflow": None, "log_every_steps": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    assert train_ranks(path, 2) == [0, 0]

    rows = read_metrics(tmp_path / "run")
    losses = [row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics]
    assert len(losses) == 4
    assert all(math.isfinite(value) for row in rows for value in row.metrics.values())
    assert any(name.startswith("validation/") for row in rows for name in row.metrics)
    trained = TrainedModel.open(tmp_path / "run/checkpoints/step-00000004")
    assert losses[0] == pytest.approx(math.log(trained.tokenizer.size), abs=0.5)
    if family == "encoder_only":  # whether the second text follows the first
        assert rows[0].metrics["train/next_sentence_loss"] == pytest.approx(math.log(2), abs=0.3)

    told = pretrain("generate", tmp_path / "run", "Thank you for", "A longer text that", "--max-new-tokens", "5")
    if family == "encoder_only":
        assert "models of the family encoder_only don't generate text" in str(told.exception)
    else:
        assert told.exit_code == 0, told.exception
    exported = pretrain("export", tmp_path / "run", tmp_path / "out")
    assert exported.exit_code == 0, exported.exception

    transformers = pytest.importorskip("transformers")
    loaded, report = getattr(transformers, AUTO_CLASSES[family]).from_pretrained(
        tmp_path / "out", trust_remote_code=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert len(tokenizer) == trained.tokenizer.size
    ids = torch.tensor([[5, 9, 14, 3, 8, 40, 7]])
    with torch.no_grad():
        if AUTO_CLASSES[family] == "AutoModelForSeq2SeqLM":
            found = loaded(input_ids=ids, decoder_input_ids=ids).logits
            expected = trained.model.decode(ids, trained.model.encode(ids))
        elif family == "encoder_only":
            found = loaded(input_ids=ids).logits
            expected = trained.model.masked_lm_logits(trained.model.encode(ids))
        else:
            found = loaded(input_ids=ids).logits
            expected = trained.model.decode(ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# ---- generation of the autoregressive encoder-decoder


def of_random_weights(std=0.7, **changes):
    """A model in fp64 whose weights all matter: texts vary, and rounding never decides between two tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, **STACKS, "num_encoder_layers": 2, "max_positions": 40, **SUBTRACTED}
    model = build(AutoregressiveConfig(**{**sizes, **changes}))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=std)
    return model.double().eval()


def until_eos(row, eos=1):
    return row[: row.index(eos) + 1] if eos in row else row


PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14], [15, 16]]


@pytest.mark.parametrize("changes", [{}, {"order": "alternate", "add_positions": True}], ids=["best", "alternate"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_rows_that_are_padded_on_the_left_generate_what_they_do_alone(num_beams, changes):
    model = of_random_weights(**changes)
    chosen = GenerationSettings(max_new_tokens=20, num_beams=num_beams)
    together = generate(model, *padded(PROMPTS, 0, left=True), chosen).tolist()
    assert len({tuple(row) for row in together}) == len(PROMPTS)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = generate(model, torch.tensor([prompt]), None, chosen)[0].tolist()
        assert until_eos(row) == until_eos(alone)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_exported_file_generates_the_same_tokens(num_beams, byte_level_bpe, modules_of_transformers, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(ByteLevelBPE.read(byte_level_bpe / "gpt2"), [], 0)
    pad, eos = tokenizer.vocabulary.pad, tokenizer.vocabulary.eos
    model = of_random_weights(0.4, vocab_size=tokenizer.size, pad_id=pad, eos_id=eos).float()  # as in the files
    export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).double()
    prompts, mask = padded([[id_ * 1000 for id_ in prompt] for prompt in PROMPTS], pad, left=True)
    chosen = GenerationSettings(max_new_tokens=12, num_beams=num_beams)
    found = generate(model.double(), prompts, mask, chosen).tolist()
    theirs = loaded.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=12, num_beams=num_beams)
    expected = theirs[:, prompts.size(1) :].tolist()
    assert len({tuple(row) for row in found}) == len(PROMPTS)
    assert [until_eos(row, eos) for row in found] == [until_eos(row, eos) for row in expected]
