"""The memory of a forward and backward pass, from a pass of the run's own model on the meta device.

The model's code runs on tensors without memory that report a GPU as their device. So the layers themselves decide
which kernels run and what autograd saves for them; no formula repeats that.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pretrain import models
from pretrain.config.models import EncoderOnlyConfig
from pretrain.functional.attention import using
from pretrain.models import ModelConfig
from pretrain.zero.construction import layers, recomputed


class LiveMemory(TorchDispatchMode):
    """Counts the storages that are created on `device` within its block until they are freed.

    `allocated` are the bytes that exist now, `peak` the most that existed at once. What kernels allocate inside, and
    what an allocator wastes, doesn't count.
    """

    def __init__(self, device: str):
        super().__init__()
        self._device = device
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self.allocated = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type == self._device:
                storage = value.untyped_storage()
                self._watch(storage, storage.nbytes())
        return result

    def without(self, tensors: Iterable[Tensor]) -> Self:
        """Leaves out `tensors`, which existed before."""
        for tensor in tensors:
            self._watch(tensor.untyped_storage(), 0)
        return self

    def _watch(self, storage: UntypedStorage, size: int) -> None:
        key = storage._cdata

        def freed(_: object) -> None:
            del self._storages[key]
            self.allocated -= size

        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, freed)
            self.allocated += size
            self.peak = max(self.peak, self.allocated)


@dataclass(frozen=True)
class Rows:
    """`count` rows of `inputs` and `targets` tokens, of which `predicted` count. They have an attention mask, like the
    rows that `batch.micro_batch_size: auto` measures."""

    count: int
    inputs: int
    targets: int
    predicted: int


class Activations(NamedTuple):
    """Bytes at the peak of a forward and backward pass, and what the forward pass keeps for the backward pass.

    The weights don't count, and a parameter's gradient only until it is complete.
    """

    peak: int
    saved: int


@cache
def activations(
    config: ModelConfig,
    rows: Rows,
    precision: str,
    checkpointing: bool,
    on_gpu: bool = True,
    fused_attention: bool = True,
    attention: Literal["auto", "sdpa", "triton", "eager"] = "auto",
) -> Activations:
    """The memory of a pass over `rows` in training.

    `on_gpu`: the forms that the layers take there; otherwise those of a CPU. `fused_attention`: PyTorch's kernels where
    the layers ask for them, which don't keep the attention weights; otherwise the plain formula, with which a CPU
    computes attention if its bias is learned. `attention` is `compute.attention`; `auto` is expected to take this
    project's kernels on a GPU.
    """
    backend = attention if attention != "auto" else "triton" if on_gpu else None
    model = models.outline(config).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    as_on_gpu = _AsOnGpu(on_gpu, fused_attention)
    if checkpointing:
        for layer in layers(model).values():
            layer.forward = recomputed(as_on_gpu.around(layer.forward))
    for parameter in model.parameters():  # ZeRO moves a gradient to its own buffer as soon as it is complete
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with torch.device("meta"):
        batch = _batch(config, rows, on_gpu)
    memory = LiveMemory("meta").without([*model.parameters(), *model.buffers()])
    with memory, as_on_gpu, using(backend):
        loss = torch.stack([values.sum() for values in model(**batch).values()]).sum()
        saved = memory.allocated
        loss.backward()
    return Activations(memory.peak, saved)


def _batch(config: ModelConfig, rows: Rows, on_gpu: bool) -> dict[str, Tensor]:
    batch = {
        "encoder_input_ids": torch.zeros(rows.count, rows.inputs, dtype=torch.long),
        "labels": torch.zeros(rows.count, rows.targets, dtype=torch.long),
        "encoder_attention_mask": torch.ones(rows.count, rows.inputs, dtype=torch.long),
    }
    if on_gpu or isinstance(config, EncoderOnlyConfig):
        batch["target_indices"] = torch.zeros(rows.count * rows.predicted, dtype=torch.long)
    if isinstance(config, EncoderOnlyConfig) and config.next_sentence:
        batch["next_sentence_labels"] = torch.zeros(rows.count, dtype=torch.long)
    return batch


class _AsOnGpu(TorchFunctionMode):
    """Replaces what the meta device can't do, or does otherwise than a GPU.

    Tensors say that they are on a GPU, if `on_gpu`, since layers choose their forms by that. Where these are PyTorch's
    attention, its kernels are those that CUDA would take: the memory-efficient one with a bias, the flash one without.
    """

    def __init__(self, on_gpu: bool, fused_attention: bool):
        super().__init__()
        self._on_gpu, self._fused = on_gpu, fused_attention

    def around(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` within this mode also in the backward pass, in which PyTorch turns modes off."""

        def within(*args: Any, **kwargs: Any) -> Tensor:
            with self:
                return function(*args, **kwargs)

        return within

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on_gpu and function == _IS_CUDA:
            return True
        chosen = _fused_attention if self._fused and function is F.scaled_dot_product_attention else function
        return chosen(*args, **(kwargs or {}))


def _fused_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    aten: Any = torch.ops.aten
    if attn_mask is None and queries.dtype == torch.bfloat16:
        flash = aten._scaled_dot_product_flash_attention
        return flash(queries, keys, values, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        width = attn_mask.size(-1)
        if width % _ALIGNMENT:
            attn_mask = F.pad(attn_mask, (0, -width % _ALIGNMENT))[..., :width]
        attn_mask = attn_mask.expand(*queries.shape[:3], keys.size(2))
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(queries, keys, values, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


_IS_CUDA: Any = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_ALIGNMENT = 8  # elements: PyTorch copies a bias whose rows are no multiple of it into rows that are
