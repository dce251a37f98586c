"""docs/results/recipes.md: its table is what the run files say, and every recipe can be planned."""

import re
from pathlib import Path

import pytest

from benchmarks.recipes import RECIPES, corpora, counted, hours
from data_pipeline.foundation.config_file import load
from data_pipeline.objectives import Denoising
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
