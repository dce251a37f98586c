"""`pretrain adapt`: turns decoder-only models into an encoder-decoder (Zhang et al. 2025, "Encoder-Decoder Gemma")."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data_pipeline.base.config_file import check
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer, meaning_of_ids
from pretrain import export as huggingface
from pretrain import models
from pretrain.config.model_config import Heads
from pretrain.config.models import StackConfig
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel, save_weights
from pretrain.export.load import CONFIG
from pretrain.models import DecoderOnlyConfig, ModelConfig, ModernConfig, T5Gemma2Config, T5GemmaConfig
from pretrain.models.state_dict_adapter import lacks

STYLES: dict[str, type[ModelConfig]] = {"t5gemma": T5GemmaConfig, "t5gemma2": T5Gemma2Config, "modern": ModernConfig}
_GEMMA = {
    "positions": ("rotary",),
    "subtract_positions": ("none",),
    "prefix_attention": ("causal",),
    "activation": ("geglu",),
    "norm": ("rms_around_one",),
    "norm_after": (True,),
    "biases": (False,),
    "scale_embedding": (True,),
    "tie_embeddings": (True,),
}
# settings of a decoder with the values that an encoder-decoder of this style can have; it can have any value of others
_CAN_BE: dict[str, Mapping[str, tuple]] = {
    "t5gemma": {**_GEMMA, "qk_norm": (False,)},
    "t5gemma2": {**_GEMMA, "qk_norm": (True,), "attention_softcap": (None,), "output_softcap": (None,)},
    "modern": {
        "positions": ("rotary", "learned"),
        "subtract_positions": ("none",),
        "prefix_attention": ("causal",),
    },
}
_STACK_KEYS = frozenset(StackConfig.model_fields)
# settings in which two decoders may differ: the adapted model takes the decoder's, or they don't matter
_MAY_DIFFER = {*_STACK_KEYS, *ModelConfig.model_fields, "init_std", "tie_embeddings", "output_softcap"}

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
    """The weights of an encoder-decoder.

    Attributes:
        state: the weights by name.
        origins: the origin of each weight; None: the weight is new.
        new: the number of new elements of weights that come from a decoder and have more rows here.
    """

    state: dict[str, Tensor]
    origins: dict[str, Origin | None]
    new: dict[str, int]


def adapt(decoder: Path, out: Path, style: str, encoder: Path | None, sentinels: int | None, seed: int) -> list[str]:
    """Writes the checkpoint `out` of step 0. Returns lines that say which weights were copied, and which are new.

    `decoder` and `encoder`: directories that transformers saved, checkpoints or runs. `sentinels`: the tokenizer's
    number of sentinels, for objectives that need them; None: unchanged. `seed`: for new weights.
    """
    if style not in STYLES:
        raise UserError(f"--style: expected {', '.join(STYLES)}, got {style!r}")
    refuse_existing(out)
    decoder_config, decoder_state, tokenizer = read_decoder(decoder)
    encoder_config, encoder_state, other = read_decoder(encoder) if encoder else (None, decoder_state, tokenizer)
    if meaning_of_ids(other) != meaning_of_ids(tokenizer):
        raise UserError(f"--encoder: {encoder} has another tokenizer than {decoder}")
    tokenizer = _with_sentinels(tokenizer, sentinels)
    try:
        config = target(style, decoder_config, encoder_config, tokenizer.vocabulary.start)
    except UserError as error:
        raise UserError(f"{decoder}: {error}") from None
    config = config.model_copy(update={"vocab_size": tokenizer.size})
    result = adapted(config, encoder_state, decoder_state, seed)
    save_weights(config, result.state, tokenizer, out)
    return table(result, {"decoder": decoder, "encoder": encoder or decoder})


def refuse_existing(out: Path) -> None:
    """Raises UserError if there are files in `out` already: before minutes of work, not after."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; choose another directory")


def read(path: Path) -> tuple[ModelConfig, State, Tokenizer]:
    """The config of the model at `path`, its `state_dict()` in fp32 and its tokenizer.

    `path`: a directory that transformers saved, a checkpoint or a run. Raises UserError if there is none, FailedError
    if files are damaged.
    """
    if (path / CONFIG).exists():
        return huggingface.read(path)
    trained = TrainedModel.open(checkpoint_in(path))
    return trained.model.config, trained.model.state_dict(), trained.tokenizer


def read_decoder(path: Path) -> tuple[DecoderOnlyConfig, State, Tokenizer]:
    """`read`. Raises UserError for another model than a decoder_only one."""
    config, state, tokenizer = read(path)
    if not isinstance(config, DecoderOnlyConfig):
        raise UserError(f"{path}: a model of the family {config.family}; expected a decoder_only model")
    return config, state, tokenizer


def _with_sentinels(tokenizer: Tokenizer, sentinels: int | None) -> Tokenizer:
    if sentinels is None:
        return tokenizer
    if tokenizer.sentinels not in (0, sentinels):
        reason = f"the tokenizer has {tokenizer.sentinels} sentinels; another number would change their ids"
        raise UserError(f"--sentinels: {reason}; leave --sentinels out")
    return Tokenizer(tokenizer.model, tokenizer.special_tokens, sentinels)


def table(result: Adapted, paths: dict[str, Path]) -> list[str]:
    """A line for each group of parameters with one origin, then the sums. `paths`: the decoder that each stack comes
    from."""
    sizes: Counter[tuple[str, str]] = Counter()
    for name, found in result.origins.items():
        size = result.state[name].numel()
        new = result.new.get(name, 0) if found else size
        if found:
            sizes[_group(name), f"{_group(found.name)} of {paths[found.stack]}"] += size - new
        if new:
            sizes[_group(name), "new"] += new
    new = sum(size for (_, source), size in sizes.items() if source == "new")
    widths = [max(len(row[column]) for row in sizes) for column in (0, 1)]
    lines = [f"{part:{widths[0]}}  {source:{widths[1]}}  {size:>15,}" for (part, source), size in sizes.items()]
    return [*lines, f"{sizes.total() - new:,} parameters copied, {new:,} new"]


def _group(name: str) -> str:
    """decoder.layers.3.cross_attention.q.weight → decoder.cross_attention"""
    return ".".join(re.sub(r"layers\.\d+\.", "", name).split(".")[:-1][:2])


def target(
    style: str, decoder: DecoderOnlyConfig, encoder: DecoderOnlyConfig | None = None, bos_id: int | None = None
) -> ModelConfig:
    """The config of the family `style`. Its decoder has the layers of `decoder`; its encoder has the layers of
    `encoder`, by default of `decoder`, too. `bos_id`: the first input of its decoder.

    Raises UserError that names the settings which the family can't have, or in which the two decoders may not differ.
    """
    for config in (decoder, encoder or decoder):
        if lacking := lacks(_CAN_BE[style], config):
            able = [other for other in STYLES if not lacks(_CAN_BE[other], config)]
            way_out = f"; use --style {' or '.join(able)}" if able else "; no style can"
            raise UserError(f"the family {style} can't have {', '.join(lacking)}{way_out}")
    if encoder is not None:
        _check_alike(style, decoder, encoder)
    kind = STYLES[style]
    shared = kind.model_fields.keys() & DecoderOnlyConfig.model_fields.keys() - {"family", "tie_embeddings"}
    values: dict[str, object] = {name: getattr(decoder, name) for name in shared}
    if style != "t5gemma2":
        stacks = {"encoder": encoder or decoder, "decoder": decoder}
        values |= {name: {key: getattr(stack, key) for key in _STACK_KEYS} for name, stack in stacks.items()}
    if style == "modern":
        tied = "none" if not decoder.tie_embeddings else "all" if encoder is None else "output"
        values |= {"tie_embeddings": tied, "cross_rotation": decoder.positions == "rotary"}
    else:
        values["bos_id"] = bos_id
    return check(values, kind, f"the family {style}")


def _check_alike(style: str, decoder: DecoderOnlyConfig, encoder: DecoderOnlyConfig) -> None:
    if style == "t5gemma2":
        raise UserError("--encoder: in a t5gemma2 both stacks have one width, one depth and one embedding matrix")
    unlike = [
        f"{name} is {there!r} in the encoder's and {here!r} in the decoder's"
        for name in DecoderOnlyConfig.model_fields
        if name not in _MAY_DIFFER and (here := getattr(decoder, name)) != (there := getattr(encoder, name))
    ]
    if unlike:
        raise UserError(f"--encoder: both stacks of a {style} share these settings: {'; '.join(unlike)}")


def origin(name: str, crosses: bool) -> Origin | None:
    """The origin of the weight `name` of an encoder-decoder; None: it is new. `crosses`: cross-attention comes from the
    decoder's self-attention; otherwise it is new.

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


def adapted(config: ModelConfig, encoder: State, decoder: State, seed: int = 0) -> Adapted:
    """The weights of the encoder-decoder `config`, from the `state_dict()` of two decoders, which may be the same.

    Cross-attention is new if the stacks' widths differ. Matrices of tokens may get further rows. New weights and rows
    are drawn as at the start of a run with this seed.
    """
    states = {"encoder": encoder, "decoder": decoder}
    stacks = (getattr(config, name, None) for name in states)
    crosses = len({stack.d_model for stack in stacks if isinstance(stack, Heads)}) <= 1
    shapes = {name: tuple(tensor.shape) for name, tensor in models.meta_model(config).named_parameters()}
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
    return Adapted(state, origins, new)
