"""The models that the checks for a GPU decode with."""

import torch

from checks.gpu.checks.generation import CAN_GENERATE, random_model
from pretrain.generation.decoding import generate
from pretrain.generation.settings import GenerationSettings
from tests.tables import each


@each("family", CAN_GENERATE)
def test_the_models_of_the_checks_generate(family):
    ids = torch.randint(3, 24, (2, 5), generator=torch.Generator().manual_seed(0))
    assert generate(random_model(family), ids, None, GenerationSettings(max_new_tokens=3)).shape[0] == 2
