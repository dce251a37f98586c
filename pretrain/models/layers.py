"""The small layers of all models. Constructors initialise the weights, so that ZeRO-3 can partition them at once."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pretrain.config.model_config import Heads, ModelConfig, Norm
from pretrain.models.functional.arithmetic import RMSNormInCache, at_least_fp32, drop


def grad_barrier(x: Tensor) -> Tensor:
    """Makes `x` one node of the graph for all its uses in a module.

    Autograd then sums the gradients of these uses before it adds the gradients of other uses of `x`. ZeRO-3 sums in the
    same order, so every ZeRO stage gives the same bits.
    """
    return x.view_as(x)


class SkipInit(TorchFunctionMode):
    """Skips random initialisation inside the block: use it when a checkpoint is loaded next."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].zero_() if function is Tensor.normal_ else function(*args, **(kwargs or {}))


def draw_normal(weight: Tensor, std: float) -> None:
    """Fills `weight` from N(0, std²).

    Always drawn in fp32 on the CPU: a model built under ZeRO-3, in bf16 on its device, starts with the same values as a
    model that is built first and then moved.
    """
    if not weight.is_meta:
        with torch.no_grad():
            weight.copy_(torch.empty_like(weight, dtype=torch.float32, device="cpu").normal_(std=std))


class Layer(nn.Module):
    """One of the repeated layers of a model. A subclass defines `run`, which `forward` calls.

    In training, `run` may be compiled, or recomputed in the backward pass. In evaluation it never is, since decoding
    gives layers inputs that grow with every token.
    """

    run: Callable[..., Tensor]
    _in_training: Callable[..., Tensor] | None = None

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        prepared = self._in_training if self.training else None
        return (prepared or self.run)(*inputs, **options)

    def prepare(self, backend: Any = None, recomputed: bool = False, flags: Any = None, **options: Any) -> None:
        """Has `run` compiled in training by a `backend` of torch.compile with its options `flags`, unless None, and
        recomputed in the backward pass if `recomputed`, with `options` of `torch.utils.checkpoint.checkpoint`."""
        run = self.run if backend is None else torch.compile(self.run, backend=backend, options=flags)
        self._in_training = partial(checkpoint, run, use_reentrant=False, **options) if recomputed else run


class Linear(nn.Linear):
    """A matrix drawn from N(0, std²), optionally with a bias vector that starts at zero."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = False):
        self.std = std  # nn.Linear's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        draw_normal(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def fused_linear(x: Tensor, *linears: Linear, fused: bool) -> tuple[Tensor, ...]:
    """The outputs of all `linears` for the same input `x` (…, features).

    `fused`: as one product where that is faster, on GPUs. Each parameter keeps its name and RMS; their rows are copied
    side by side for the product. All or none of them have a bias vector.
    """
    result = joined_linear(x, *linears, fused=fused)
    if result is None:
        return tuple(one(x) for one in linears)
    return result.split([one.out_features for one in linears], dim=-1)


def joined_linear(x: Tensor, *linears: Linear, fused: bool) -> Tensor | None:
    """The outputs of `fused_linear` side by side; None where they are not one product."""
    if not (fused and fusing_is_faster(x)):
        return None
    biases: list[Tensor] = [one.bias for one in linears if one.bias is not None]
    weights: list[Tensor] = [one.weight for one in linears]
    return F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)


def fusing_is_faster(x: Tensor) -> bool:
    """On a CPU the cores are busy with the narrowest product already."""
    return x.is_cuda


def fuse_linears(layer: nn.Module) -> None:
    """Lets the modules of `layer` fuse their projections. Not under ZeRO-3, whose hooks gather each matrix by itself,
    unless it gathers whole layers."""
    for module in layer.modules():
        if hasattr(module, "fused"):
            setattr(module, "fused", True)  # noqa: B010 - not every module declares it


class Embedding(nn.Embedding):
    """A table of vectors drawn from N(0, std²). The row `padding_idx` is zero and gets no gradient from look-ups."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float, padding_idx: int | None = None):
        self.std = std
        super().__init__(num_embeddings, embedding_dim, padding_idx)

    def reset_parameters(self) -> None:
        draw_normal(self.weight, self.std)
        if self.padding_idx is not None:
            nn.init.zeros_(self.weight[self.padding_idx])


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019): no mean, no bias, the variance in fp32.

    `around_one`: the gains are 1 + weight, and the weight starts at zero (Gemma).
    """

    def __init__(self, d_model: int, epsilon: float = 1e-6, around_one: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d_model) if around_one else torch.ones(d_model))
        self.epsilon, self.around_one = epsilon, around_one

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (…, d_model); computes in fp32 whatever the dtype of `x`."""
        # sums with 1 are at least in fp32: bf16 would round them
        gains = 1 + self.weight.to(at_least_fp32(self.weight)) if self.around_one else self.weight
        if x.device.type in ("cpu", "meta") and torch.is_grad_enabled():
            return RMSNormInCache.apply(grad_barrier(x), gains, self.epsilon)
        return F.rms_norm(grad_barrier(x).to(gains.dtype), gains.shape, gains, self.epsilon).to(x.dtype)


def normalisation(kind: str, width: int, epsilon: float, bias: bool = False) -> nn.Module:
    """A norm of `kind`: "layer", "rms", or "rms_around_one". Only the first can have a bias vector."""
    if kind == "layer":
        return LayerNorm(width, epsilon, bias)
    return RMSNorm(width, epsilon, around_one=kind == "rms_around_one")


class LayerNorm(nn.LayerNorm):
    """Layer normalisation (Ba et al. 2016), optionally without a bias vector, or without gains too."""

    def __init__(self, d_model: int, epsilon: float = 1e-5, bias: bool = True, gains: bool = True):
        super().__init__(d_model, epsilon, elementwise_affine=gains, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (batch, length, d_model); the statistics are in fp32 whatever the dtype of `x`."""
        return super().forward(grad_barrier(x))


class Dropout(nn.Dropout):
    """`drop` in training."""

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.p) if self.training else x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
GATES = {"swiglu": "silu", "geglu": "gelu_tanh"}  # gated layers, with the activation of their gates
_WIDTHS = ("d_model", "d_ff", "num_heads")


@dataclass(frozen=True)
class LayerConfig:
    """The settings that the layers of a stack have in common. Most are described in `DecoderOnlyConfig`.

    - `activation`: one of ACTIVATIONS or GATES.
    - `std` initialises matrices; None: by their fan-in. `out_std` initialises the matrices that end a residual branch,
      `feed_forward_std` the matrices of feed-forward layers; None: `std`.
    - `scaled`: attention logits are divided by √d_kv; otherwise the initialisation of `q` carries that factor.
    - `post_norm`: norms come after a sublayer's output is added (Vaswani et al. 2017).
    """

    heads: Heads
    activation: str
    norm: Norm
    layer_norm_epsilon: float
    norm_after: bool = False
    qk_norm: bool = False
    biases: bool = False
    attention_softcap: float | None = None
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    activation_dropout_rate: float = 0.0
    std: float | None = None
    out_std: float | None = None
    scaled: bool = True
    post_norm: bool = False
    feed_forward_std: float | None = None

    @classmethod
    def of(cls, config: ModelConfig, stack: Heads | None = None, branches: int = 1, **others: Any) -> "LayerConfig":
        """The settings of these names that `config` has, and `others`, the family's own.

        `stack`: the widths, if they aren't the config's. All matrices have its `init_std`, if it has one; those that
        end one of the `branches` of a stack start smaller by √`branches`, so that their sum starts with the deviation
        of one (Radford et al. 2019, section 2.3). Attention has the dropout of all else unless it has its own.
        """
        settings: Any = config
        if stack is None:
            stack = (
                settings
                if isinstance(settings, Heads)
                else Heads(**{name: getattr(settings, name) for name in _WIDTHS})
            )
        own = {one.name: getattr(settings, one.name) for one in fields(cls) if hasattr(settings, one.name)}
        if hasattr(settings, "init_std"):
            std = config.hidden_std(settings.init_std)
            own |= {"std": std, "out_std": std * branches**-0.5}
        return cls(**{"heads": stack, "attention_dropout_rate": config.dropout_rate, **own, **others})

    def new_norm(self) -> nn.Module:
        return normalisation(self.norm, self.heads.d_model, self.layer_norm_epsilon, self.biases)

    def new_head_norm(self) -> nn.Module | None:
        """The norm of each head's queries or keys, which comes before rotation; None without `qk_norm`."""
        kind = "rms" if self.norm == "layer" else self.norm
        return normalisation(kind, self.heads.d_kv, self.layer_norm_epsilon) if self.qk_norm else None


class FeedForward(nn.Module):
    """wo(activation(wi x)) (Vaswani et al. 2017, 3.3), or gated, wo(activation(wi_0 x) · (wi_1 x)) (Shazeer 2020)."""

    wi: Linear
    wi_0: Linear
    wi_1: Linear

    def __init__(self, settings: LayerConfig):
        super().__init__()
        d_model = settings.heads.d_model
        d_ff = settings.heads.d_ff
        activation = settings.activation
        std, bias = settings.feed_forward_std or settings.std, settings.biases
        self.gated = activation in GATES
        for name in ("wi_0", "wi_1") if self.gated else ("wi",):
            self.add_module(name, Linear(d_model, d_ff, std or d_model**-0.5, bias))
        self.wo = Linear(d_ff, d_model, settings.out_std or std or d_ff**-0.5, bias)
        self.activation = ACTIVATIONS[GATES.get(activation, activation)]
        self.dropout = Dropout(settings.activation_dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.wo(self.dropout(self.activation(self.wi(x))))
        # not `fused_linear`: torch.compile would compute both gradients for each number of the joined gradient
        return self.wo(self.dropout(self.activation(self.wi_0(x)) * self.wi_1(x)))
