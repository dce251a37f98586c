"""AdamW (Loshchilov and Hutter 2019), and its step on a tensor, for optimizers that build on it."""

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from pretrain.config.optimizers.adamw import AdamWConfig


def adamw(groups: ParamsT, config: AdamWConfig) -> AdamW:
    """AdamW updates each element independently, so PyTorch's works under ZeRO."""
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def count_step(values: Tensor, state: dict[str, Tensor]) -> None:
    """Begins a step of AdamW on `values` (size,). `state` is empty before the first step."""
    if not state:
        state["step"] = torch.zeros((), device=values.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
    state["step"] += 1


def fused_adamw(
    values: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """A step of AdamW, which reads and writes each element once."""
    moments = [state["exp_avg"]], [state["exp_avg_sq"]]
    beta1, beta2 = betas
    torch._fused_adamw_(
        [values], [gradient], *moments, [], [state["step"]],
        lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
