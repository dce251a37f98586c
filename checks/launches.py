"""How many kernels a training step launches on a GPU, and how many bytes they read and write, counted without one.

    python -m checks.launches

T5 v1.1 base in bf16 takes 128 rows of 512 inputs and 114 targets, on one GPU, with AdamW and clipping; its layers are
not compiled. The passes run on tensors without memory, in the forms that a GPU takes. The update is that of a small
model on a CPU, with as many parameters; its bytes are scaled to the sizes of T5 v1.1 base. The result is written to
docs/results/gpu/launches.csv.

Views and allocations launch nothing, an operation one kernel, unless LAUNCHES says otherwise. Bytes are those of the
tensors that an operation gets and returns: caches spare some, and a product may read its operands more than once.
"""

import csv
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checks.gpu.runner import ROOT
from data_pipeline.loading.prefetch import with_counts
from pretrain import models
from pretrain.engine.construction import prepare_layers
from pretrain.engine.optimizers import flat_buffers
from pretrain.models.functional.attention_backends import using
from pretrain.models.kernels import flash_operator
from pretrain.models.layers import RMSNorm
from pretrain.models.model import Model
from pretrain.tools.plan_memory import DeviceForms
from tests.support.rank_processes import on_ranks
from tests.support.small_runs import T5, engine_of, micro_batches, own_layout, run_config

FILE = ROOT / "docs/results/gpu/launches.csv"
ROWS, INPUTS, TARGETS, LAYERS = 128, 512, 114, 12
BASE = ROOT / "configs/models/t5-v1.1-base.yaml"
LAUNCHES = {"constant_pad_nd": 2}  # it fills, then copies
_NOTHING = (
    "detach",
    "empty",
    "new_empty",
    "set_",
    "_unsafe_view",
    "record_stream",
    "promote_types",
    "_record_function",
)
_OVERWRITTEN = ("copy_", "_foreach_copy_", "zero_", "fill_")  # the first argument isn't read
_IN_PLACE = {"_fused_adamw_": (0, 2, 3)}  # weights and moments; of other lists the first is written
_BODIES: dict[str, Any] = {  # this project's operations, and what runs in them
    "encdec::flash_attention": flash_operator.attention._init_fn,
    "encdec::flash_attention_backward": flash_operator._attention_backward._init_fn,
}


class Launches(TorchDispatchMode):
    """Counts kernels and bytes by the names of operations, within its block."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, name: str, kernels: int, size: int) -> None:
        self.kernels[name] += kernels
        self.bytes[name] += size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        with self:
            if body := _BODIES.get(function.name()):
                with patch.object(flash_operator, "_launch", self._launched):
                    return body(*args, **given)
            if (composed := function.decompose(*args, **given)) is not NotImplemented:
                return composed
        result = function(*args, **given)
        name = function.overloadpacket.__name__
        if not function.is_view and not name.startswith(_NOTHING):
            read = args[1:] if name in _OVERWRITTEN else args
            written = [args[place] for place in _IN_PLACE.get(name, (0,))] if result is None else result
            self.add(name, _kernels(name, args), _bytes((read, given, written)))
        return result

    def _launched(self, kernel: Any, of_queries: bool, pointers: Any, *_: Any) -> None:
        self.add(kernel.__name__, 1, _bytes(pointers))


def _kernels(name: str, args: Any) -> int:
    """PyTorch's CUDA kernels for lists of tensors take those of one dtype; a copy may convert."""
    if name.startswith("_foreach") and name != "_foreach_copy_":
        tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
        return len(args[0]) if len({one.dtype for one in tensors}) > 1 else 1
    return LAUNCHES.get(name, 1)


def _bytes(values: Any) -> int:
    tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in tensors)


def meta_model(**layers: int) -> Model:
    """T5 v1.1 base, without memory, or with so many layers of each stack."""
    numbers = {f"num_{stack}_layers": number for stack, number in layers.items()}
    config = run_config(1, {**yaml.safe_load(BASE.read_text())["model"], **numbers}, compute={"compile": False})
    model = models.meta_model(config.model).bfloat16().train()
    prepare_layers(model, config.compute, 1)
    return model


def passes(rows: int, **layers: int) -> tuple[Launches, Launches]:
    """The forward and the backward pass of a micro-batch."""
    model, forward, backward = meta_model(**layers), Launches(), Launches()

    def norm(module: Any, given: Any, result: Tensor) -> None:
        """A GPU's kernels, in place of casts and zeros: all that the meta device does for a norm."""
        forward.add("rms_norm", 1, 2 * result.nbytes)
        forward.add("_to_copy", -1, 0)
        backward.add("rms_norm", 2, 5 * result.nbytes)
        backward.add("_to_copy", -2, 0)
        backward.add("zeros_like", -1, 0)

    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.register_forward_hook(norm)
    with torch.device("meta"):
        ids, labels = (torch.zeros(rows, length, dtype=torch.long) for length in (INPUTS, TARGETS))
        batch = {"encoder_input_ids": ids, "labels": labels, "target_indices": labels.flatten()}
    with forward, DeviceForms(on_gpu=True), using("triton"):
        loss = model(**batch)["labels"].sum()
    with backward:
        torch.autograd.grad(loss, list(model.parameters()))
    return forward, backward


def update(count: int) -> Launches:
    """What a step of `count` micro-batches takes beside their passes."""
    kernels, size, parameters = on_ranks(1, _update, count)[0]
    found, scale = Launches(), meta_model().num_parameters() / parameters
    for name in kernels:
        found.add(name, kernels[name], round(scale * size[name]))
    return found


def _update(count: int) -> tuple[Counter[str], Counter[str], int]:
    flat_buffers.IN_PARTS = frozenset()  # as on a GPU
    layers = {"num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS, "feed_forward": "gated-gelu"}
    config = run_config(1, {**T5, **layers, "tie_embeddings": False}, precision="bf16")
    engine, model, batch = engine_of(config), models.build(config.model).bfloat16(), micro_batches(own_layout(), 0)[0]
    weights = list(model.parameters())
    for step in range(2):  # the first makes the moments
        with Launches() as found:
            engine.step(step, range(count), [with_counts(batch)] * count)
    assert engine.applied
    with Launches() as passed:
        torch.autograd.grad(model(**batch)["labels"].sum(), weights)
    _add(found, passed, -count)
    engine.close()
    return found.kernels, found.bytes, sum(one.numel() for one in weights)


def parts(count: int) -> dict[str, Launches]:
    """Of a step of `count` micro-batches. A layer's are those of a model with one more."""
    few = passes(ROWS // count, encoder=1, decoder=1)
    more = {
        "encoder": passes(ROWS // count, encoder=2, decoder=1),
        "decoder": passes(ROWS // count, encoder=1, decoder=2),
    }
    found: dict[str, Launches] = {}
    for number, direction in enumerate(("forward", "backward")):
        rest = found[f"embeddings, biases, loss, {direction}"] = Launches()
        _add(rest, few[number], count)
        for stack, passed in more.items():
            of_layers = found[f"{stack} layers, {direction}"] = Launches()
            for into, factor in ((of_layers, LAYERS * count), (rest, -count)):
                _add(into, passed[number], factor)
                _add(into, few[number], -factor)
    return {**found, "counts, gradients added up, norm, clipping, AdamW, weights": update(count)}


def _add(into: Launches, counted: Launches, times: int) -> None:
    for name in counted.kernels:
        into.add(name, times * counted.kernels[name], times * counted.bytes[name])


def main() -> None:
    header, rows = ["part"], {}
    for count in (1, 2, 8):
        header += [f"{kind}, {count} micro-batch{'es' * (count > 1)}" for kind in ("kernels", "GB")]
        counted = parts(count)
        whole = counted["a step"] = Launches()
        for name, one in counted.items():
            rows.setdefault(name, [name]).extend([one.kernels.total(), f"{one.bytes.total() / 1e9:.1f}"])
            _add(whole, one, int(one is not whole))
    with FILE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows.values()])
    print(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
