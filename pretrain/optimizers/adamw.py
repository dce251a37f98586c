"""AdamW with weight decay for matrices alone."""

from torch import nn
from torch.optim import AdamW

from pretrain.config import OptimizerSection


def adamw(model: nn.Module, config: OptimizerSection) -> AdamW:
    """AdamW over `model`'s parameters; vectors (norms) are not decayed. Its rate is set before each step."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if config.weight_decay == 0:  # one group: fewer collectives
        groups = [{"params": parameters, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
