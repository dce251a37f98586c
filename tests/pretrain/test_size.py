"""The sizes of the presets that ship are those of the publications."""

import re
from pathlib import Path

import pytest

from data_pipeline.foundation.config_file import Section, load
from pretrain import models
from pretrain.config.models import AnyModelConfig
from tests.tables import each

FOLDER = Path(__file__).parents[2] / "configs/models"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# of transformers' models, where the publication rounds
PUBLISHED = {
    "t5-v1.0-small": 60_506_624,
    "t5-v1.0-base": 222_903_552,
    "t5-v1.0-large": 737_668_096,
    "t5-v1.0-3b": 2_851_598_336,
    "t5-v1.0-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
    "t5-v1.1-1m": 968_192,
    "t5-v1.1-5m": 4_755_712,
    "t5-v1.1-15m": 15_472_384,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen3-0.6b": 596_049_920,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-270m": 268_098_176,
    "t5gemma-s": 312_517_632,
    "t5gemma-b": 591_490_560,
    "t5gemma-l": 1_241_761_792,
    "t5gemma-xl": 3_766_980_608,
    "t5gemma-2b-2b": 5_596_853_760,
    "t5gemma-9b-9b": 20_333_401_088,
    "t5gemma-9b-2b": 12_292_375_296,
}


class ModelFile(Section):
    model: AnyModelConfig


@each("preset", PRESETS)
def test_a_preset_has_the_size_that_is_published_and_named(preset):
    config = load(FOLDER / f"{preset}.yaml", [], ModelFile).model
    parameters = models.outline(config).num_parameters()
    assert PUBLISHED.get(preset, parameters) == parameters
    text = (FOLDER / f"{preset}.yaml").read_text()
    if preset.startswith("t5-"):
        assert preset in PUBLISHED
        assert f": {parameters:,} parameters." in text.splitlines()[0]
    if named := re.fullmatch(r"t5(?:-v1.1|gemma2)-([\d.]+)m", preset):
        assert parameters == pytest.approx(float(named[1]) * 1e6, rel=0.06)
        assert f"{parameters:,} parameters" in text


def test_every_published_size_ships():
    assert PUBLISHED.keys() <= set(PRESETS)
