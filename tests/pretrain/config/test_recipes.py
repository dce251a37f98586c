"""docs/results/recipes.md: its table is what the run files say, recipes can be planned, and sizes are as published."""

import csv
import re
from pathlib import Path

import pytest

from benchmarks.recipes import RECIPES, corpora, counted, hours
from data_pipeline.base.config_file import Section, load
from data_pipeline.corpus.objectives.denoising import Denoising
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.models import AnyModelConfig
from tests.support.tables import each

ROOT = Path(__file__).parents[3]
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
    cells = ROWS["[t5-v1.1-base-c4](../../configs/runs/t5-v1.1-base-c4.yaml)"]
    assert [cells[-3], cells[-1]] == [hours("t5-v1.1-base-c4", "a100-80gb", gpus) for gpus in (8, 64)]


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
        sum(parameter.numel() for parameter in models.meta_model(run(recipe).model).parameters())
        for recipe in ("gpt2-small-c4", "autoregressive-small-c4")
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


PUBLISHED = ROOT / "docs/results/experiments/published.csv"
PUBLISHED_PARAMETERS = {
    one["row"]: int(one["parameters"]) for one in csv.DictReader(PUBLISHED.read_text("utf-8").splitlines())
}
# Yan 2024, the appendix of the README: width, heads, dropout, what is subtracted, and the embedding loss
YAN = {
    "plain": (150, 5, 0.0, "none", None),
    "cosine": (150, 5, 0.0, "none", ("cosine", 1.0)),
    "mse": (150, 5, 0.0, "none", ("mse", 1.0)),
    "subtracted": (150, 5, 0.0, "without_norm", None),
    "mse-subtracted": (150, 5, 0.0, "without_norm", ("mse", 8.0)),
    "decoder": (160, 10, 0.0, "none", None),
    "decoder-narrow": (156, 12, 0.0, "none", None),
    "decoder-dropout": (160, 10, 0.2, "none", None),
}


@each("row, settings", YAN.items())
def test_the_rows_of_yan_2024_are_as_published(row, settings):
    """Yan counts no positions, and where there is no embedding loss a layer norm that isn't used (2 · 150)."""
    assert YAN.keys() == PUBLISHED_PARAMETERS.keys()
    found = load(ROOT / f"configs/experiments/autoregressive/{row}.yaml", [], RunConfig)
    of_model = {name: one.numel() for name, one in models.meta_model(found.model).named_parameters()}
    positions = sum(number for name, number in of_model.items() if "position" in name)
    unused = 300 if settings[-1] is None and not row.startswith("decoder") else 0
    assert sum(of_model.values()) - positions + unused == PUBLISHED_PARAMETERS[row]
    model, optimizer, schedule = found.model, found.optimizer, found.schedule
    loss = getattr(model, "embedding_loss", None)
    own = model.d_model, model.num_heads, model.dropout_rate, model.subtract_positions
    assert (*own, loss and (loss.kind, loss.coefficient)) == settings
    if loss:
        published = {"embedding_norm": "before_mean", "encoder_norm": True, "learned_norms": True}
        assert loss.model_dump().items() >= (published | {"detach": "encoder_out"}).items()
    if row.startswith("decoder"):
        assert (model.num_layers, model.d_ff, model.activation, model.biases) == (26, 4 * own[0], "gelu", False)
    else:
        assert (model.num_encoder_layers, model.num_decoder_layers, model.num_cross_heads) == (13, 13, 10)
        assert (model.order, model.bridge_norm, model.add_positions, model.bias) == ("original", False, False, False)
    assert (model.vocab_size, model.max_positions, model.positions) == (50257, 200, "learned")
    assert (found.run.max_steps, found.run.seed, found.batch.global_batch_size) == (9000, 1337, 800)  # 16 times 50 rows
    rates = optimizer.learning_rate, optimizer.betas, optimizer.weight_decay, optimizer.gradient_clipping
    assert rates == (9e-4, (0.9, 0.95), 0.1, 0.0)
    assert (schedule.warmup_steps, schedule.until_step, schedule.final_learning_rate) == (300, 700_000, 9e-5)
    (without_decay,) = optimizer.groups  # his decay is of tensors with two dimensions
    assert (without_decay.match, without_decay.weight_decay) == (["norms", "biases"], 0.0)


# The sizes of the presets that ship are those of the publications, which their first lines name


FOLDER = ROOT / "configs/models"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# those that the files don't name
PUBLISHED = {
    "autoregressive-yan2024": 15_763_500 + 201 * 150,  # published without positions
    # two equal stacks: q and o, k and v, the feed-forward layer, four norms, and norms of queries and keys
    "t5gemma2-270m-270m": 368_424_192,
    "t5gemma2-1b-1b": 1_697_782_016,
    "t5gemma2-4b-4b": 7_089_110_016,
}

WINDOWS = {"t5gemma2-270m-270m": 512, "t5gemma2-1b-1b": 512, "t5gemma2-4b-4b": 1024}  # config.json of each


class ModelFile(Section):
    model: AnyModelConfig


@each("preset", PRESETS)
def test_a_preset_has_the_size_that_is_published_and_named(preset):
    config = load(FOLDER / f"{preset}.yaml", [], ModelFile).model
    parameters = models.meta_model(config).num_parameters()
    named = re.findall(r"([\d,]+) (?:parameters|with them)", (FOLDER / f"{preset}.yaml").read_text().split("model:")[0])
    assert parameters == (PUBLISHED.get(preset) or int(named[-1].replace(",", "")))
    assert not preset.startswith("transformer-") or config.label_smoothing == 0.1  # Vaswani et al., section 5.4
    if preset in WINDOWS:
        assert (config.sliding_window, config.rope_factor) == (WINDOWS[preset], 8.0)
    if millions := re.fullmatch(r"(?:t5-v1.1|t5gemma2|bart)-([\d.]+)m", preset):
        assert parameters == pytest.approx(float(millions[1]) * 1e6, rel=0.06)


def test_every_published_size_ships():
    assert len(PRESETS) == 50
