"""Which weight of the encoder-decoder comes from which weight of a decoder."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain import models
from pretrain.models import ModelConfig

State = Mapping[str, Tensor]
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(self|cross)_attention(.*)")
_OUTSIDE = {
    "embedding.weight": ("encoder", "embedding.weight"),
    "decoder_embedding.weight": ("decoder", "embedding.weight"),
    "lm_head.weight": ("decoder", "lm_head.weight"),
}


class Origin(NamedTuple):
    """The weight `name` of the decoder that became the stack `stack`."""

    stack: str
    name: str


class Adapted(NamedTuple):
    """The weights of the encoder-decoder by name, and where each comes from; None: it is new.

    `new`: the elements of weights that come from a decoder but have more rows here. `unused`: the elements of decoders'
    weights that aren't used here.
    """

    state: dict[str, Tensor]
    origins: dict[str, Origin | None]
    new: dict[str, int]
    unused: dict[Origin, int]


def origin(name: str, crosses: bool) -> Origin | None:
    """Where the weight `name` of an encoder-decoder comes from. `crosses`: cross-attention comes from the decoder's own
    self-attention; otherwise it is new.

    decoder.layers.3.cross_attention.q.weight → decoder.layers.3.attention.q.weight, of the decoder
    encoder.final_norm.weight → decoder.final_norm.weight, of the encoder
    """
    if name in _OUTSIDE:
        return Origin(*_OUTSIDE[name])
    if found := _LAYER.fullmatch(name):
        stack, number, kind, rest = found.groups()
        if kind == "cross" and not crosses:
            return None
        return Origin(stack, f"decoder.layers.{number}.attention{rest}")
    stack, rest = name.split(".", 1)
    return Origin(stack, f"decoder.{rest}")


def adapted(config: ModelConfig, encoder: State, decoder: State, crosses: bool, seed: int = 0) -> Adapted:
    """The weights of the encoder-decoder `config`, from the `state_dict()` of one decoder or two.

    Matrices of tokens may get further rows. New weights and rows are drawn as at the start of a run with this seed.
    """
    states = {"encoder": encoder, "decoder": decoder}
    shapes = {name: tuple(tensor.shape) for name, tensor in models.outline(config).named_parameters()}
    origins = {name: origin(name, crosses) for name in shapes}
    taken = {name: states[one.stack][one.name] for name, one in origins.items() if one is not None}
    incomplete = [name for name, shape in shapes.items() if name not in taken or tuple(taken[name].shape) != shape]
    state = {name: tensor.clone() for name, tensor in taken.items()}  # files hold no tensor under two names
    new: dict[str, int] = {}
    if incomplete:
        torch.manual_seed(seed)
        drawn = models.build(config).state_dict()
        for name in incomplete:
            state[name] = drawn[name]
            if name in taken:  # a matrix with a row for each token
                rows = min(len(taken[name]), len(drawn[name]))
                state[name][:rows] = taken[name][:rows]
                new[name] = state[name][rows:].numel()
    used = {tensor.data_ptr() for tensor in taken.values()}  # a tied matrix has two names
    unused = {
        Origin(stack, name): tensor.numel()
        for stack, weights in states.items()
        for name, tensor in weights.items()
        if tensor.data_ptr() not in used
    }
    return Adapted(state, origins, new, unused)
