"""Losses and gradients of each family: the device against the CPU in fp32, and bf16 against fp32."""

from typing import Any

import torch
from torch import Tensor

from checks.gpu.report import Json, Report
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from pretrain import models
from pretrain.models.functional.attention_backends import using
from pretrain.models.model import Model
from tests.support.small_families import FAMILIES

LIMIT = 1e-5  # relative L2, fp32
LIMIT_BF16 = 2e-2  # of the mean loss


def families(report: Report) -> None:
    if not report.cuda:
        report.skip("CUDA against CPU", "no GPU: the CPU is compared with fp64 on the CPU")
    for name, values in FAMILIES.items():
        for kind in ("full", "padded"):
            with report.part(f"{name}, {kind}"):
                _compare(report, name, kind, values)


def _compare(report: Report, name: str, kind: str, values: Json) -> None:
    batch = _batch(kind)
    base = _model(values)
    exact = torch.float32 if report.cuda else torch.float64
    wanted_losses, wanted = _losses_and_gradients(base.to(exact), batch, torch.device("cpu"))
    found_losses, found = _losses_and_gradients(_model(values), batch, report.device)
    differences = {
        key: float((found[key].double() - gradient.double()).norm() / gradient.double().norm())
        for key, gradient in wanted.items()
        if not key.endswith(".k.bias")  # softmax cancels it: its true gradient is zero
    }
    key = max(differences, key=lambda name: differences[name])
    of_losses = float((found_losses.double() - wanted_losses.double()).norm() / wanted_losses.double().norm())
    report.row("fp32", family=name, rows=kind, losses=of_losses, gradients=differences[key], of=key)
    report.expect(f"{name}, {kind}: losses", of_losses < LIMIT, of_losses)
    report.expect(f"{name}, {kind}: gradients", differences[key] < LIMIT, {key: differences[key]})
    rounded, gradients = _losses_and_gradients(_model(values).bfloat16(), batch, report.device)
    of_bf16 = float((rounded.double().sum() - wanted_losses.double().sum()).abs() / wanted_losses.double().sum())
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    report.row("bf16", family=name, rows=kind, mean_loss=of_bf16)
    report.expect(f"{name}, {kind}: bf16", of_bf16 < LIMIT_BF16 and finite, of_bf16)


def _model(values: Json) -> Model:
    torch.manual_seed(0)
    model = models.build(models.parse({"vocab_size": 200, **values}))
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights, so that attention isn't uniform
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.train()


def _batch(kind: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (4, 128), generator=generator)
    labels = torch.randint(3, 200, (4, 128), generator=generator)
    if kind == "full":
        return {"encoder_input_ids": ids, "labels": labels}
    mask = (torch.arange(128) < torch.tensor([128, 64, 7, 100])[:, None]).long()
    return {
        "encoder_input_ids": ids * mask,
        "labels": labels.masked_fill(mask == 0, IGNORE_INDEX),
        "encoder_attention_mask": mask,
    }


def _losses_and_gradients(model: Model, batch: Batch, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each label and the gradient of their mean, on the CPU."""
    model = model.to(device)
    inputs: dict[str, Any] = {name: tensor.to(device) for name, tensor in batch.items()}
    with using("triton" if device.type == "cuda" else None):
        losses = model(**inputs)
    total = torch.stack([one.sum() for one in losses.values()]).sum() / (inputs["labels"] != IGNORE_INDEX).sum()
    total.backward()
    gradients = {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}
    return losses["labels"].detach().cpu(), gradients
