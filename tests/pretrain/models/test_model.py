"""What every family must do: compute without waiting for the host, and ignore padding."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import widened
from pretrain.models import build, meta_model, parse
from pretrain.models.functional.arithmetic import CrossEntropy, chunked_cross_entropy
from pretrain.models.functional.attention_backends import Backend, using
from tests.support.slow import slow
from tests.support.small_models import MODELS, ONE_OF_EACH_FAMILY
from tests.support.small_runs import micro_batches
from tests.support.tables import each


class Devices(TorchDispatchMode):
    """Notes the operations that read or make a tensor outside of the meta device, whose tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere = set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) and not one.is_meta for one in tree_leaves((args, kwargs, result))):
            self.elsewhere.add(str(function))
        return result


def batch_of(columns: dict[str, int], device: str = "cpu") -> dict[str, Tensor]:
    return {name: torch.ones(2, width, dtype=torch.long, device=device) for name, width in columns.items()}


PLAIN = {"encoder_input_ids": 16, "labels": 16}
PACKED = {**PLAIN, "encoder_attention_mask": 16} | {
    f"{side}_{kind}": 16 for side in ("encoder", "decoder") for kind in ("segment_ids", "positions")
}
OTHERS = [name for name in MODELS if name not in (*ONE_OF_EACH_FAMILY, "t5, alibi")]


@each("name", [*(one for one in ONE_OF_EACH_FAMILY if one != "double_decoder"), "t5, alibi", *slow(*OTHERS)])
def test_no_pass_asks_for_a_value_or_copies_one_from_the_host(name):
    """On the meta device a value that is asked for is an error, and a copy from the host is seen. As on GPUs, the batch
    has the indices of its targets, and attention is this project's kernels or PyTorch's."""
    model = meta_model(parse({"vocab_size": 100, **MODELS[name], "dropout_rate": 0.1})).train()
    forms: list[tuple[dict[str, int], Backend]] = [(PLAIN, "sdpa"), (PACKED, "sdpa"), (PACKED, "triton")]
    for columns, backend in forms:
        batch = {**batch_of(columns, "meta"), "target_indices": torch.ones(20, dtype=torch.long, device="meta")}
        with using(backend), Devices() as devices:
            total = torch.stack([losses.sum() for losses in model(**batch).values()]).sum()
            torch.autograd.grad(total, [*model.parameters()], allow_unused=True)
        assert devices.elsewhere == set()


def test_nor_does_the_loss_of_targets_in_chunks():
    x, weight = (torch.empty(32, 8, device="meta", requires_grad=True) for _ in range(2))
    labels, indices = (torch.ones(count, dtype=torch.long, device="meta") for count in (32, 20))
    with Devices() as devices:
        losses = chunked_cross_entropy(x, weight, None, labels, CrossEntropy(1e-4, 0.1, 5.0), indices)
        torch.autograd.grad(losses.sum(), (x, weight))
    assert devices.elsewhere == set()


@each("name", ONE_OF_EACH_FAMILY)
def test_padding_to_a_width_changes_no_loss_and_no_gradient(name):
    """In fp64, where rounding is some 1e-16: rows of which some are shorter, and rows that are all as long."""
    torch.manual_seed(0)
    model = build(parse({"vocab_size": 100, **MODELS[name], "dropout_rate": 0.0})).double().train()
    for padded in (False, True):
        (batch, _) = micro_batches(BatchLayout(0, 1, 4, 2), int(padded), 20, 20)
        masked = {"encoder_attention_mask": torch.ones_like(batch["encoder_input_ids"]), **batch}
        wide = widened(masked, 50, 50, {"labels": IGNORE_INDEX})
        assert wide["labels"].shape == wide["encoder_input_ids"].shape == (4, 50)
        found = []
        for one in (batch, wide):
            losses = model(**one)
            total = torch.stack([values.sum() for values in losses.values()]).sum()
            gradients = torch.autograd.grad(total, [*model.parameters()], allow_unused=True)
            found.append([total, *(one for one in gradients if one is not None)])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
