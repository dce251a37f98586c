"""Pictures of a model's learned positions and relative position biases."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pretrain.config.evaluation import PositionsSettings
from pretrain.evaluation.hook import Evaluation, Findings
from pretrain.evaluation.record import new_figure
from pretrain.models.positions import LearnedPositions
from pretrain.models.t5 import RelativePositionBias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 512  # positions on an axis


class PositionPictures:
    """Images `positions/MODULE`: cosines between the vectors of positions, or a curve of biases for each head.

    A model without learned positions gives none.
    """

    def __init__(self, settings: PositionsSettings):
        pass

    def evaluate(self, evaluation: Evaluation) -> Findings:
        images: dict[str, Figure] = {}
        with evaluation.whole_model() as model:
            for name, module in model.named_modules() if evaluation.held_out.layout.rank == 0 else ():
                title = f"{name}, step {evaluation.step}"
                if isinstance(module, LearnedPositions):
                    images[f"positions/{name}"] = _similarities(module, title)
                elif isinstance(module, RelativePositionBias):
                    images[f"positions/{name}"] = _curves(module, title)
        return Findings(images=images)


def similarities(positions: LearnedPositions) -> torch.Tensor:
    """Cosines (positions, positions) between the vectors of the first positions, fp32."""
    vectors = positions.weight[positions.offset :][:_MOST].float()
    vectors = F.normalize(vectors, dim=-1)
    return (vectors @ vectors.T).cpu()


def _similarities(positions: LearnedPositions, title: str) -> "Figure":
    figure = new_figure(5, 4.2)
    axes = figure.add_subplot(title=f"cosine of positions: {title}", xlabel="position", ylabel="position")
    figure.colorbar(axes.imshow(similarities(positions), cmap="RdBu_r", vmin=-1, vmax=1))
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
