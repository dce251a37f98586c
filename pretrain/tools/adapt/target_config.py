"""The config of the encoder-decoder that a decoder, or two of them, become."""

from collections.abc import Mapping

from data_pipeline.foundation.config_file import check
from data_pipeline.foundation.errors import UserError
from pretrain.config.models import StackConfig
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
# Settings of a decoder, each with the values that an encoder-decoder of this style can have; it can have all of others.
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
# Settings in which two decoders may differ: those of the adapted model are the decoder's, or don't matter.
_MAY_DIFFER = {*_STACK_KEYS, *ModelConfig.model_fields, "init_std", "tie_embeddings", "output_softcap"}


def target(
    style: str, decoder: DecoderOnlyConfig, encoder: DecoderOnlyConfig | None = None, bos_id: int | None = None
) -> ModelConfig:
    """The config of the family `style` whose decoder has the layers of `decoder`, and whose encoder has those of
    `encoder`, by default of `decoder` too. `bos_id` is what its decoder starts from.

    Raises UserError that names the settings which that family can't have, and those in which the two may not differ.
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
