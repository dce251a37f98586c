"""The hooks `embedding` and `positions`: metrics of the embedding matrix, and pictures of positions."""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from diagnostics.settings import EmbeddingSettings, PositionsSettings
from pretrain.evaluate.hook import EvalResult, Evaluation
from pretrain.evaluate.record import new_figure
from pretrain.models.layers import Embedding
from pretrain.models.model import Model
from pretrain.models.positions import LearnedPositions
from pretrain.models.t5 import RelativePositionBias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 512  # positions on an axis


class EmbeddingShape:
    """Metrics of the rows of the embedding matrix, without those that pad the vocabulary.

    embedding/effective_rank: from 1, if all rows are multiples of one vector, to d_model; see `effective_rank`.
    embedding/mean_norm: the mean L2 norm of the rows.
    embedding/mean_cosine: the mean cosine of two rows; 1 if all rows have the same direction.
    """

    def __init__(self, settings: EmbeddingSettings):
        pass

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        with evaluation.whole_model() as model:
            if evaluation.held_out.layout.rank != 0:
                return EvalResult()
            rows = embedding(model).float()
            metrics = {
                "effective_rank": effective_rank(rows),
                "mean_norm": float(rows.norm(dim=1).mean()),
                "mean_cosine": mean_cosine(rows),
            }
        return EvalResult({f"embedding/{name}": value for name, value in metrics.items()})


def embedding(model: Model) -> Tensor:
    """The rows of the embedding matrix (ids, d_model), without those that pad the vocabulary."""
    return next(module for module in model.modules() if isinstance(module, Embedding)).weight[: model.config.vocab_size]


def effective_rank(rows: Tensor) -> float:
    """e to the entropy of the singular values of `rows` (n, d), normalized to sum to 1 (Roy & Vetterli 2007)."""
    precise = rows.double()
    values = torch.linalg.eigvalsh(precise.T @ precise).clamp(min=0).sqrt()
    shares = values / values.sum()
    shares = shares[shares > 0]
    return math.exp(float(-(shares * shares.log()).sum()))


def mean_cosine(rows: Tensor) -> float:
    """The mean cosine of two different rows of `rows` (n, d), from the norm of the sum of their directions."""
    directions = F.normalize(rows.double(), dim=1)
    number, length = len(rows), float(directions.sum(dim=0).square().sum())
    return (length - number) / (number * (number - 1))


class PositionPictures:
    """Images `positions/MODULE`: cosines between the vectors of positions, or a curve of biases for each head.

    A model without learned positions gives no images.
    """

    def __init__(self, settings: PositionsSettings):
        pass

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        images: dict[str, Figure] = {}
        with evaluation.whole_model() as model:
            for name, module in model.named_modules() if evaluation.held_out.layout.rank == 0 else ():
                title = f"{name}, step {evaluation.step}"
                if isinstance(module, LearnedPositions):
                    images[f"positions/{name}"] = _similarities(module, title)
                elif isinstance(module, RelativePositionBias):
                    images[f"positions/{name}"] = _curves(module, title)
        return EvalResult(images=images)


def _similarities(positions: LearnedPositions, title: str) -> "Figure":
    vectors = F.normalize(positions.weight[positions.offset :][:_MOST].float(), dim=-1)
    figure = new_figure(5, 4.2)
    axes = figure.add_subplot(title=f"cosine of positions: {title}", xlabel="position", ylabel="position")
    figure.colorbar(axes.imshow((vectors @ vectors.T).cpu(), cmap="RdBu_r", vmin=-1, vmax=1))
    return figure


def _curves(bias: RelativePositionBias, title: str) -> "Figure":
    farthest = 2 * bias.max_distance
    first = farthest if bias.bidirectional else 0
    # the diagonals of as many queries as keys, from the farthest key before a query to the farthest after it
    length = farthest + 1 + first
    distances = torch.arange(-farthest, first + 1)
    row = bias(length, length)[:, length - 1 + distances].float().cpu()
    figure = new_figure(6, 4)
    axes = figure.add_subplot(title=title, xlabel="key position − query position", ylabel="bias of the logit")
    for head, values in enumerate(row):
        axes.plot(distances, values, label=f"head {head}", linewidth=1)
    axes.legend(fontsize=6, ncols=2)
    return figure
