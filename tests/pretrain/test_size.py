"""The size of a model by its settings is that of the model itself, for every preset that ships."""

import re
from pathlib import Path

import pytest

from data_pipeline.foundation.config_file import Section, load
from pretrain import models
from pretrain.models.config.size import size_of
from pretrain.models.families import AnyModelConfig
from pretrain.models.model import Sizes

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs/models").glob("*.yaml"))


class ModelFile(Section):
    model: AnyModelConfig


@pytest.mark.parametrize("preset", PRESETS)
def test_the_arithmetic_comes_close_to_the_model(preset):
    config = load(f"configs/models/{preset}.yaml", [], ModelFile).model
    model, size = models.outline(config), size_of(config)
    inputs, targets = 512, 114 if model.decoder_reads_targets else 512
    assert size.parameters == pytest.approx(model.num_parameters(), rel=0.03)
    assert size.flops(inputs, targets) == pytest.approx(model.flops(Sizes.of_example(inputs, targets)), rel=0.05)


SIZES_IN_NAMES = [
    (preset, float(size[1])) for preset in PRESETS if (size := re.fullmatch(r"t5(?:-v1.1|gemma2)-([\d.]+)m", preset))
]


@pytest.mark.parametrize(("preset", "millions"), SIZES_IN_NAMES)
def test_presets_have_the_sizes_of_their_names(preset, millions):
    config = load(f"configs/models/{preset}.yaml", [], ModelFile).model
    parameters = models.outline(config).num_parameters()
    assert parameters == pytest.approx(millions * 1e6, rel=0.06)
    assert f"{parameters:,} parameters" in Path(f"configs/models/{preset}.yaml").read_text()
