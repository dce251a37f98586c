"""The small layers that T5 is made of, each initialised where it is made (so that ZeRO-3 may partition it at once)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def one_use(x: Tensor) -> Tensor:
    """`x` as one node of the graph for all that a module does with it.

    Its gradients are then summed here before they meet those of other users of `x`: in the order in which the hooks of
    ZeRO-3 sum them too, so that every stage gives the same bits.
    """
    return x.view_as(x)


class Linear(nn.Linear):
    """A matrix without a bias vector, its weights drawn from N(0, std²)."""

    def __init__(self, in_features: int, out_features: int, std: float):
        self.std = std  # nn.Linear's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A table of vectors drawn from N(0, std²)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float):
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019): no mean, no bias, the variance in fp32."""

    def __init__(self, d_model: int, epsilon: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, d_model) to the same; `F.rms_norm` computes in fp32 whatever the dtype of `x`."""
        return F.rms_norm(one_use(x), self.weight.shape, self.weight, self.epsilon)


class FeedForward(nn.Module):
    """wo(relu(wi x)) (Raffel et al. 2020, section 2.1)."""

    def __init__(self, d_model: int, d_ff: int, dropout_rate: float = 0.0):
        super().__init__()
        self.wi = Linear(d_model, d_ff, std=d_model**-0.5)
        self.wo = Linear(d_ff, d_model, std=d_ff**-0.5)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.dropout(F.relu(self.wi(x))))


class GatedFeedForward(nn.Module):
    """wo(gelu(wi_0 x) · (wi_1 x)): GEGLU (Shazeer 2020), gelu by its tanh approximation as T5 v1.1 has it."""

    def __init__(self, d_model: int, d_ff: int, dropout_rate: float = 0.0):
        super().__init__()
        self.wi_0 = Linear(d_model, d_ff, std=d_model**-0.5)
        self.wi_1 = Linear(d_model, d_ff, std=d_model**-0.5)
        self.wo = Linear(d_ff, d_model, std=d_ff**-0.5)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.dropout(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)))


FEED_FORWARDS: dict[str, type[FeedForward] | type[GatedFeedForward]] = {
    "relu": FeedForward,
    "gated-gelu": GatedFeedForward,
}
