"""Attention on a grid of lengths and masks: which kernel computes it, and how far it is from fp64."""

import itertools

import torch
from torch import Tensor

from checks.gpu.report import Report
from pretrain.functional.arithmetic import soft_capped
from pretrain.functional.attention import attend
from pretrain.functional.attention_bias import MASKED, Window, toeplitz, visible
from pretrain.models.attention import logit_bias

LENGTHS = (63, 64, 114, 128, 192, 320, 512)  # 64 and 192 leave 64 after tiles of 128
OURS = ("causal", "bias", "bias and padding", "padding", "packed", "masked whole", "window", "soft cap")
MASKS = ("none", *OURS)  # OURS: on a GPU, by this project's kernel
# Relative L2 of outputs and of gradients. bf16 rounds by up to 2⁻⁹, the inputs of the second product of each result and
# the result itself. On a CPU the logits are rounded as well, of which some are as large as 4.
LIMITS = {torch.float32: 3e-5, torch.bfloat16: 2**-8}
LIMITS_ON_CPU = {torch.float32: 3e-5, torch.bfloat16: 2**-6}
BACKWARD = "encdec_flash_attention"  # in the name of the graph's node that this project's kernel makes


def attention(report: Report) -> None:
    batch, heads, width = (2, 2, 16) if report.small else (4, 12, 64)
    lengths = LENGTHS[:4] if report.small else LENGTHS
    if report.small:
        report.skip("lengths above 128", "shorter on a CPU")
    limits = LIMITS if report.cuda else LIMITS_ON_CPU
    worst: dict[str, float] = {}
    kernels: dict[str, dict[str, list[int]]] = {}
    grid = {
        f"{mask}, {length}, {str(dtype).removeprefix('torch.')}": (mask, batch, heads, length, width, dtype)
        for dtype, length, mask in itertools.product(LIMITS, lengths, MASKS)
    }
    for name, (mask, _, _, length, _, dtype) in grid.items():
        with report.part(name):
            case = _Case(*grid[name], report.device)
            kernel, differences, finite = case.compare()
            kernels.setdefault(mask, {}).setdefault(kernel, []).append(length)
            largest = max(differences.values())
            key = f"{mask}, {str(dtype).removeprefix('torch.')}"
            worst[key] = max(worst.get(key, 0.0), largest)
            if report.cuda:
                report.expect(f"kernel: {name}", (BACKWARD in kernel) == (mask in OURS), kernel)
            report.expect(f"finite: {name}", finite, kernel)
            report.expect(f"near fp64: {name}", largest < limits[dtype], {"kernel": kernel, **differences})
    report.fact(
        "kernels", {mask: {kernel: sorted(set(at)) for kernel, at in by.items()} for mask, by in kernels.items()}
    )
    report.fact("largest_relative_difference", worst)


class _Case:
    """Random queries, keys, values and an upstream gradient, which is zero for queries that see no key."""

    def __init__(
        self, mask: str, batch: int, heads: int, length: int, width: int, dtype: torch.dtype, device: torch.device
    ):
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.inputs = {name: random(batch, heads, length, width).requires_grad_() for name in "qkv"}
        self.scale = width**-0.5
        self.upstream = random(batch, heads, length, width)
        if mask.startswith("bias"):
            self.inputs["bias"] = random(heads, 2 * length - 1).requires_grad_()
        seen, segments = None, None
        self.blind = torch.zeros(batch, length, dtype=torch.bool, device=device)
        if mask.endswith("padding"):
            seen = torch.ones(batch, length, device=device)
            seen[0, length // 2 :] = 0
        elif mask == "masked whole":
            seen = torch.ones(batch, length, device=device)
            seen[0] = 0
            self.blind[0] = True
        elif mask == "packed":
            segments = 1 + (torch.arange(length, device=device) >= length // 3).long().expand(batch, length)
        self.softcap = 2.0 if mask == "soft cap" else None
        window = Window(before=length // 4, after=length // 4) if mask == "window" else None
        self.masks = {"causal": mask == "causal", "window": window, "key_mask": seen}
        self.masks |= {"query_segments": segments, "key_segments": segments}
        self.mask = visible(length, length, device, **self.masks)
        self.upstream[self.blind[:, None].expand(batch, heads, length)] = 0

    def results(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output as the models compute it, and the gradients."""
        queries, keys, values = (self.inputs[name] for name in "qkv")
        x = queries.transpose(1, 2).flatten(2)
        bias = logit_bias(x, keys.size(2), self.inputs.get("bias"), **self.masks)
        found = attend(queries, keys, values, bias, False, self.scale, 0.0, self.softcap)
        return found, torch.autograd.grad(found, list(self.inputs.values()), self.upstream)

    def compare(self) -> tuple[str, dict[str, float], bool]:
        """The kernel, the relative differences from fp64 by tensor, and whether all is finite."""
        inputs = {name: tensor.detach().double().requires_grad_() for name, tensor in self.inputs.items()}
        found, gradients = self.results()
        expected = self._in_fp64(**inputs)
        wanted = torch.autograd.grad(expected, list(inputs.values()), self.upstream.double())
        sighted = ~self.blind[:, None, :, None]
        finite = bool(found.isfinite().all()) and all(bool(one.isfinite().all()) for one in gradients)
        differences = {"output": _difference(found * sighted, expected * sighted)}
        for name, gradient, other in zip(self.inputs, gradients, wanted, strict=True):
            differences[f"gradient of {name}"] = _difference(gradient, other)
        return _kernel(found), differences, finite

    def _in_fp64(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = self.scale * (q @ k.transpose(-1, -2))
        if self.softcap is not None:
            logits = soft_capped(logits, self.softcap)
        if bias is not None:
            logits = logits + toeplitz(bias, k.size(2))
        if self.mask is not None:
            logits = logits.masked_fill(~self.mask, MASKED)
        return torch.softmax(logits, -1) @ v


def _kernel(output: Tensor) -> str:
    """The kernel that made `output`, as its node of the graph names it."""
    name = type(output.grad_fn).__name__ if output.grad_fn is not None else "none"
    return name.removeprefix("ScaledDotProduct").removesuffix("0").removesuffix("Backward")


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())
