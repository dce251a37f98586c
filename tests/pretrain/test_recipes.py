"""docs/results/recipes.md: its table is what the run files say, and every recipe can be planned."""

import re
from operator import attrgetter
from pathlib import Path

import pytest

from benchmarks.recipes import RECIPES, corpora, counted, hours
from data_pipeline.foundation.config_file import load
from data_pipeline.objectives.denoising import Denoising
from pretrain import models
from pretrain.config import RunConfig
from tests.tables import each

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/results/recipes.md").read_text(encoding="utf-8")
TABLE = [re.split(r" *\| *", line)[1:-1] for line in PAGE.splitlines() if line.startswith("| [")]
ROWS = {cells[0]: cells for cells in TABLE}


def run(recipe: str) -> RunConfig:
    return load(ROOT / f"configs/runs/{recipe}.yaml", [], RunConfig)


@each("recipe", RECIPES)
def test_the_exact_columns_are_what_the_run_file_says(recipe):
    exact = counted(recipe)
    assert ROWS[exact[0]][: len(exact)] == exact


@pytest.mark.slow
def test_the_hours_are_those_of_the_plan():
    cells = ROWS["[t5-v1.1-small-c4](../../configs/runs/t5-v1.1-small-c4.yaml)"]
    assert cells[-3] == hours("t5-v1.1-small-c4", "a100-80gb", 8)


def test_the_page_names_the_corpus_file_of_each_recipe():
    for recipe in RECIPES:
        directory = run(recipe).data.train[0].corpus
        files = (ROOT / "configs/corpora").glob("*.yaml")
        (name,) = (file.stem for file in files if f"output: {directory}\n" in file.read_text())
        assert f"`{name}`" in PAGE, recipe


def test_barts_noise_is_what_its_authors_posted():
    """fairseq's issue 1899; the arguments are in docs/results/recipes.md."""
    posted = dict(re.findall(r"--([a-z-]+)\s+([a-z\d.-]+)", re.search(r"`(--mask 0.3 .*?)`", PAGE, re.DOTALL)[1]))
    for recipe in ("bart-base-c4", "bart-large-c4"):
        noise = corpora()[run(recipe).data.train[0].corpus].rows.objective
        assert isinstance(noise, Denoising)
        assert posted["mask-length"].split("-") == noise.span_length.split("_")
        assert {name: float(value) for name, value in posted.items() if name != "mask-length"} == {
            "mask": noise.mask_ratio,
            "poisson-lambda": noise.poisson_lambda,
            "replace-length": noise.replace_length,
            "mask-random": noise.random_ratio,
            "permute-sentences": noise.permute_sentence_ratio,
            "rotate": noise.rotate_probability,
            "insert": noise.insert_ratio,
        }


def test_the_autoregressive_recipe_is_as_large_as_gpt2():
    sizes = [
        sum(parameter.numel() for parameter in models.outline(run(recipe).model).parameters())
        for recipe in ("gpt2-small-c4", "autoregressive-small-c4")
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


# Yan 2024, the appendix of the README: settings of all rows, of the encoder-decoders, of the decoders, and a row's own
YAN_ALL = {
    "run.max_steps": 9000,
    "run.seed": 1337,
    "batch.global_batch_size": 800,  # 50 rows, 16 times accumulated
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 9e-4,
    "optimizer.betas": (0.9, 0.95),
    "optimizer.weight_decay": 0.1,
    "optimizer.gradient_clipping": 0.0,
    "optimizer.eps": 1e-8,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 300,
    "schedule.until_step": 700_000,
    "schedule.final_learning_rate": 9e-5,
    "precision": "bf16",
    "model.vocab_size": 50257,
    "model.max_positions": 200,
    "model.positions": "learned",
    "model.label_smoothing": 0.0,
    "model.z_loss": 0.0,
}
YAN_PAIRS = {
    "model.family": "autoregressive",
    "model.d_model": 150,
    "model.num_heads": 5,
    "model.num_cross_heads": 10,
    "model.num_encoder_layers": 13,
    "model.num_decoder_layers": 13,
    "model.order": "original",
    "model.bridge_norm": False,
    "model.add_positions": False,
    "model.bias": False,
    "model.dropout_rate": 0.0,
    "model.init_std": 0.02,
}
YAN_DECODERS = {
    "model.family": "decoder_only",
    "model.num_layers": 26,
    "model.biases": False,
    "model.activation": "gelu",
}
LOSS = {"embedding_norm": "before_mean", "encoder_norm": True, "learned_norms": True, "detach": "encoder_out"}


def pair(subtracted: str, loss: dict[str, object] | None) -> dict[str, object]:
    own = {"model.embedding_loss": None} if loss is None else {f"model.embedding_loss.{k}": v for k, v in loss.items()}
    return YAN_PAIRS | {"model.subtract_positions": subtracted} | own


def decoder(width: int, heads: int, dropout: float) -> dict[str, object]:
    own = {"d_model": width, "d_ff": 4 * width, "num_heads": heads, "dropout_rate": dropout}
    return YAN_DECODERS | {f"model.{key}": value for key, value in own.items()}


YAN = {
    "plain": pair("none", None),
    "cosine": pair("none", {"kind": "cosine", "coefficient": 1.0} | LOSS),
    "mse": pair("none", {"kind": "mse", "coefficient": 1.0} | LOSS),
    "subtracted": pair("without_norm", None),
    "mse-subtracted": pair("without_norm", {"kind": "mse", "coefficient": 8.0} | LOSS),
    "decoder": decoder(160, 10, 0.0),
    "decoder-narrow": decoder(156, 12, 0.0),
    "decoder-dropout": decoder(160, 10, 0.2),
}


@each("row, settings", YAN.items())
def test_the_rows_of_yan_2024_are_as_published(row, settings):
    found = load(ROOT / f"configs/experiments/autoregressive/{row}.yaml", [], RunConfig)
    assert {key: attrgetter(key)(found) for key in YAN_ALL | settings} == YAN_ALL | settings
    (without_decay,) = found.optimizer.groups  # his decay is of tensors with two dimensions
    assert (without_decay.match, without_decay.weight_decay) == (["norms", "biases"], 0.0)
