"""Models work wherever their weights are: they make no tensor on another device.

The device that stands in for a GPU is PyTorch's `meta`, whose tensors have no values. Under FakeTensorMode an operation
on tensors of two devices fails, as it does with a CPU and a GPU.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pretrain import models
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.encoder_only import EncoderOnly
from tests.gpu.checks.families import FAMILIES
from tests.slow import slow

ROWS, LENGTH = 4, 16
RELATIVE = {name: {**FAMILIES["t5"], "positions": name} for name in ("rotary", "alibi", "sinusoidal")}
MODELS = {**FAMILIES, **{f"t5, {name}": values for name, values in RELATIVE.items()}}
FIRST = ("t5", "t5gemma2", "autoregressive")
OTHERS = [name for name in MODELS if name not in FIRST]


@pytest.fixture
def elsewhere() -> Iterator[torch.device]:
    """The device that stands in for a GPU; within the test its tensors meet no other's."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.device("meta")


def built(values: dict[str, object], device: torch.device) -> nn.Module:
    sizes = {} if "encoder" in values else {"d_model": 64, "d_ff": 128}
    with device:
        return models.build(models.parse({"vocab_size": 200, **sizes, **values}))


def test_two_devices_are_noticed(elsewhere):
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device=elsewhere) + torch.arange(3)


@pytest.mark.parametrize("kind", ["packed", *slow("plain", "padded")])
@pytest.mark.parametrize("name", [*FIRST, *slow(*OTHERS)])
def test_a_training_step_makes_no_tensor_on_another_device(name, kind, elsewhere):
    model = built(MODELS[name], elsewhere).train()
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long, device=elsewhere)
    batch = {"encoder_input_ids": ids, "labels": ids}
    if kind != "plain":
        batch["encoder_attention_mask"] = ids
    if kind == "packed":
        batch |= {f"{side}_{what}": ids for side in ("encoder", "decoder") for what in ("segment_ids", "positions")}
    if isinstance(model, EncoderOnly):  # its loss takes the rows of labels that count: their number needs values
        losses = {"logits": model.masked_lm_logits(model.encode(ids, batch.get("encoder_attention_mask")))}
    else:
        losses = model(**batch)
    sum(values.sum() for values in losses.values()).backward()
    assert {values.device for values in losses.values()} == {elsewhere}
    assert {one.grad.device for one in model.parameters() if one.grad is not None} == {elsewhere}


@pytest.mark.parametrize("name", [*FIRST, *slow(*(name for name in OTHERS if name != "encoder_only"))])
def test_decoding_with_a_cache_makes_no_tensor_on_another_device(name, elsewhere):
    model = built(MODELS[name], elsewhere).eval()
    assert not isinstance(model, EncoderOnly)
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long, device=elsewhere)
    cache = model.new_cache()
    with torch.no_grad():
        if isinstance(model, EncoderDecoder):
            states = model.encode(ids, ids)
            logits = [model.decode(ids[:, :1], states, ids, cache) for _ in range(2)]
        else:
            logits = [model.decode(ids, cache, ids), model.decode(ids[:, :1], cache, torch.cat([ids, ids[:, :1]], 1))]
    assert {one.device for one in logits} == {elsewhere}
