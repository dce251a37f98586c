"""Generation: the same tokens as on the CPU."""

import torch

from checks.gpu.report import Report
from pretrain import models
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.models.model import Model
from tests.pretrain.small_families import FAMILIES

SETTINGS = {
    "greedy": {},
    "4 beams": {"num_beams": 4},
    "sampled": {"temperature": 1.0, "top_k": 20},
}
CAN_GENERATE = [name for name in FAMILIES if name != "encoder_only"]


def generation(report: Report) -> None:
    if not report.cuda:
        report.skip("CUDA against CPU", "no GPU: the CPU is compared with itself")
    for family in CAN_GENERATE:
        for name, changes in SETTINGS.items():
            with report.part(f"{family}, {name}"):
                found = [_tokens(family, device, changes) for device in ("cpu", report.device.type)]
                report.expect(f"{family}, {name}: the CPU's tokens", found[0] == found[1])


def _tokens(family: str, device: str, changes: dict[str, float]) -> list[list[int]]:
    """The tokens for four prompts of different lengths, from large random weights in fp64, where rounding decides
    nothing."""
    model = random_model(family).to(device)
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(12) < torch.tensor([12, 9, 4, 1])[:, None]).long()
    if models.FAMILIES[family].generates == "continuations":
        mask = mask.flip(1)
    ids = torch.randint(3, 24, (4, 12), generator=generator) * mask
    settings = GenerationSettings(max_new_tokens=16, **changes)
    return generate(model, ids.to(device), mask.to(device), settings).tolist()


def random_model(family: str) -> Model:
    model = models.build(models.parse({"vocab_size": 24, **FAMILIES[family]}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn + 1 if name.endswith("norm.weight") else drawn)
    return model.double().eval()
