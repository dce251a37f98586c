"""The shape of the embedding matrix: whether its rows still differ."""

import math

import torch
from torch import Tensor

from pretrain.config.evaluation import EmbeddingSettings
from pretrain.evaluation.hook import Evaluation, Findings
from pretrain.models.layers import Embedding
from pretrain.models.model import Model


class EmbeddingShape:
    """Metrics of the rows of the embedding matrix that stand for ids.

    embedding/effective_rank: e to the entropy of the singular values, divided by their sum (Roy & Vetterli 2007); from
    1, if all rows are multiples of one vector, to d_model.
    embedding/mean_norm: the mean L2 norm of the rows.
    embedding/mean_cosine: the mean cosine of two rows; near 0 if they point everywhere, 1 if all point the same way.
    """

    def __init__(self, settings: EmbeddingSettings):
        pass

    def evaluate(self, evaluation: Evaluation) -> Findings:
        with evaluation.whole_model() as model:
            if evaluation.held_out.layout.rank != 0:
                return Findings()
            rows = embedding(model).float()
            metrics = {
                "effective_rank": effective_rank(rows),
                "mean_norm": float(rows.norm(dim=1).mean()),
                "mean_cosine": mean_cosine(rows),
            }
        return Findings({f"embedding/{name}": value for name, value in metrics.items()})


def embedding(model: Model) -> Tensor:
    """The rows of the embedding matrix (ids, d_model), without those that only pad it."""
    return next(module for module in model.modules() if isinstance(module, Embedding)).weight[: model.config.vocab_size]


def effective_rank(rows: Tensor) -> float:
    """e to the entropy of the singular values of `rows` (n, d), divided by their sum (Roy & Vetterli 2007)."""
    precise = rows.double()
    values = torch.linalg.eigvalsh(precise.T @ precise).clamp(min=0).sqrt()
    shares = values / values.sum()
    shares = shares[shares > 0]
    return math.exp(float(-(shares * shares.log()).sum()))


def mean_cosine(rows: Tensor) -> float:
    """The mean cosine of two different rows of `rows` (n, d), from the norm of the sum of their directions."""
    directions = torch.nn.functional.normalize(rows.double(), dim=1)
    number, length = len(rows), float(directions.sum(dim=0).square().sum())
    return (length - number) / (number * (number - 1))
