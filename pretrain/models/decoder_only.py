"""A decoder-only model: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019).

Pre-norm, with learned positions, GELU, and tied embedding and output. Other settings give the layers of Llama (Touvron
et al. 2023), Gemma 2 (2024), Gemma 3 and Qwen3 (2025), and rotary, linear-bias or sinusoidal positions. Without biases
it is the baseline of "Auto-regressive Encoder-Decoder Transformer" (Yan 2024), whose subtraction of positions is a
setting too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.base.errors import UserError
from pretrain.config.models import DecoderOnlyConfig
from pretrain.models.attention import AttentionInputs, KeyValueCache, real_positions
from pretrain.models.layers import Embedding, LayerConfig
from pretrain.models.model import Head
from pretrain.models.positions import LearnedPositions
from pretrain.models.rotary_hf import ACTIVATIONS, KEYS, RotarySettings
from pretrain.models.stacks import CausalModel, Encoder
from pretrain.models.state_dict_adapter import (
    Choice,
    HFModel,
    Json,
    Settings,
    State,
    drop_tensors,
    tensors_of,
    vocabulary,
    within,
)


class CausalStack(Encoder):
    """Causal self-attention and feed-forward layers. Positions count from the first real token of a prompt."""

    causal = True

    def __init__(self, config: DecoderOnlyConfig):
        layer = LayerConfig.of(config, branches=2 * config.num_layers)
        super().__init__(config, layer, config.num_layers, name="attention")
        self.subtracted_norm = layer.new_norm() if config.subtract_positions == "with_norm" else nn.Identity()

    def new_positions(self, config: DecoderOnlyConfig) -> None:
        self.config = config
        self.sinusoids_scale = config.init_std * 2**0.5  # so that they have the initial std of learned positions
        if config.positions == "learned":
            assert config.max_positions is not None
            subtracts = config.subtract_positions != "none"  # also the position after the last token
            self.positions = LearnedPositions(config.max_positions + subtracts, config.d_model, config.init_std)

    def forward(
        self, x: Tensor, inputs: AttentionInputs = AttentionInputs(), cache: list[KeyValueCache] | None = None
    ) -> Tensor:
        if inputs.encoder_positions is None and inputs.encoder_attention_mask is not None:
            past_length = cache[0].length if cache else 0
            positions = real_positions(inputs.encoder_attention_mask)[:, past_length:]
            inputs = inputs._replace(encoder_positions=positions)
        if self.config.prefix_attention != "bidirectional":
            inputs = inputs._replace(prefix_mask=None)
        return super().forward(x, inputs, cache)

    def finished(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.final_norm(x)
        if self.config.subtract_positions != "none":
            assert self.positions is not None, "checked with the config"
            x = self.subtracted_norm(x - self.positions(positions + 1))
        return x


class DecoderOnly(CausalModel):
    """The model: an embedding, one stack and an output matrix, which may be tied."""

    config: DecoderOnlyConfig

    def __init__(self, config: DecoderOnlyConfig):
        super().__init__()
        self.config = config
        rows, std = config.padded_vocab_size, config.init_std
        self.embedding = Embedding(rows, config.d_model, std)
        self.decoder = CausalStack(config)
        self.lm_head = Head(
            config.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier
        )
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight  # shared: each module uses it only in its own forward

    def states(self, ids: Tensor, inputs: AttentionInputs) -> Tensor:
        return self.decoder(self.embedding(ids), inputs)

    def decode(
        self, input_ids: Tensor, cache: list[KeyValueCache] | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Maps ids (batch, length) to logits (batch, length, padded_vocab_size). With a cache, ids follow its tokens.

        `attention_mask` (batch, past length + length), nonzero at real tokens, covers the cached tokens too. Prompts
        are padded on the left, and positions count from the first real token. The ids for an empty cache are the
        prefix.
        """
        inputs = AttentionInputs(attention_mask)
        if cache is not None and not cache[0].length:
            inputs = inputs._replace(
                prefix_mask=torch.ones_like(input_ids) if attention_mask is None else attention_mask
            )
        return self.lm_head(self.decoder(self.embedding(input_ids), inputs, cache))

    def new_cache(self) -> list[KeyValueCache]:
        """An empty cache for `decode`, one for each layer."""
        return [KeyValueCache() for _ in self.decoder.layers]


# --- GPT-2 in transformers: matrices are transposed (`Conv1D`), and c_attn has q, k and v ---

_GPT2_LAYER = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.wi": "mlp.c_fc",
    "feed_forward.wo": "mlp.c_proj",
}
_GPT2_NAMES = {
    "embedding.weight": "transformer.wte.weight",
    "decoder.positions.weight": "transformer.wpe.weight",
    **tensors_of(
        {**within("decoder.layers.{}", "transformer.h.{}", _GPT2_LAYER), "decoder.final_norm": "transformer.ln_f"},
        "weight",
        "bias",
    ),
}
_GPT2_MASKS = (".attn.bias", ".attn.masked_bias")  # published files have causal masks beside the weights
_GPT2_ACTIVATION = Choice(
    "activation_function", {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}, {"gelu_pytorch_tanh": "gelu_tanh"}
)
_GPT2_SETTINGS: Settings = {
    "d_model": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "max_positions": "n_positions",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "dropout_rate": "resid_pdrop",
    "activation": _GPT2_ACTIVATION,
}


def _gpt2_config_from_hf(settings: Json, tensors: State) -> Json:
    drop_tensors(tensors, lambda name: name.endswith(_GPT2_MASKS))
    d_ff = settings["n_inner"] or 4 * settings["n_embd"]
    return {**vocabulary(settings, pad_id=settings["eos_token_id"]), "d_ff": d_ff}


def _fused(config: DecoderOnlyConfig, state: Mapping[str, Tensor]) -> State:
    """Our tensors in GPT-2's shapes. A model without biases gets biases of zero: transformers' GPT-2 always has
    biases."""
    fused = dict(state)
    for name, tensor in state.items():
        if not config.biases and name.startswith(("decoder.layers.", "decoder.final_norm.")):
            fused[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0])
    for attention, kind in _attentions(config):
        fused[f"{attention}.qkv.{kind}"] = torch.cat([fused.pop(f"{attention}.{one}.{kind}") for one in "qkv"])
    return _transposed(fused)


def _split(config: DecoderOnlyConfig, state: State) -> State:
    parts = _transposed(state)
    for attention, kind in _attentions(config):
        chunks = parts.pop(f"{attention}.qkv.{kind}").chunk(3)
        parts |= {f"{attention}.{one}.{kind}": chunk.contiguous() for one, chunk in zip("qkv", chunks, strict=True)}
    return parts


def _attentions(config: DecoderOnlyConfig) -> Iterator[tuple[str, str]]:
    for layer in range(config.num_layers):
        for kind in ("weight", "bias"):
            yield f"decoder.layers.{layer}.attention", kind


def _transposed(state: Mapping[str, Tensor]) -> State:
    return {
        name: tensor.t().contiguous() if name.startswith("decoder.layers.") and tensor.dim() == 2 else tensor
        for name, tensor in state.items()
    }


_GPT2 = HFModel(
    config_class=DecoderOnlyConfig,
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    name="GPT-2",
    settings=_GPT2_SETTINGS,
    names=_GPT2_NAMES,
    config_to_hf=lambda config: {
        "n_inner": config.d_ff,
        "embd_pdrop": config.dropout_rate,
        "attn_pdrop": config.dropout_rate,
    },
    config_from_hf=_gpt2_config_from_hf,
    keys={"d_ff": "n_inner"},
    copies={"transformer.wte.weight": ["lm_head.weight"]},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    tensors_to_hf=_fused,
    tensors_from_hf=_split,
    can_be={
        "positions": ("learned",),
        "subtract_positions": ("none",),
        "prefix_attention": ("causal",),
        "activation": tuple(_GPT2_ACTIVATION.values),
        "norm": ("layer",),
        "norm_after": (False,),
        "qk_norm": (False,),
        "num_key_value_heads": (None,),
        "head_dim": (None,),
        "query_pre_attn_scalar": (None,),
        "sliding_window": (None,),
        "attention_softcap": (None,),
        "output_softcap": (None,),
        "scale_embedding": (False,),
        "tie_embeddings": (True,),
    },
)


# --- Llama, Qwen3 and Gemma in transformers ---

_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "dropout_rate": "attention_dropout",  # in transformers these models have no other dropout
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_CAPS = {"attention_softcap": "attn_logit_softcapping", "output_softcap": "final_logit_softcapping"}
_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "decoder.final_norm.weight": "model.norm.weight",
}
_MATRICES = {
    **{f"attention.{matrix}": f"self_attn.{matrix}_proj" for matrix in "qkvo"},
    "feed_forward.wi_0": "mlp.gate_proj",
    "feed_forward.wi_1": "mlp.up_proj",
    "feed_forward.wo": "mlp.down_proj",
}
_QK_NORMS = {f"attention.{one}_norm": f"self_attn.{one}_norm" for one in "qk"}
_NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_norm_after": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_norm_after": "post_feedforward_layernorm",
}
_ALL = {
    "positions": ("rotary",),
    "activation": tuple(ACTIVATIONS),
    "subtract_positions": ("none",),
    "prefix_attention": ("causal",),
}
_PLAIN = {
    **_ALL,
    "norm": ("rms",),
    "norm_after": (False,),
    "scale_embedding": (False,),
    "query_pre_attn_scalar": (None,),
    "attention_softcap": (None,),
    "output_softcap": (None,),
    "window_rope_base": (None,),
}
_GEMMA = {**_ALL, "norm": ("rms_around_one",), "norm_after": (True,), "scale_embedding": (True,), "biases": (False,)}


def rotary_model(
    name: str,
    model_type: str,
    class_name: str,
    can_be: Mapping[str, tuple],
    fixed: Mapping[str, Any],
    is_gemma: bool = False,
) -> HFModel:
    """A model of transformers that can have all settings of ours except those that `can_be` restricts.

    `is_gemma`: True if norms and settings have Gemma's names.
    """
    has_windows = "sliding_window" not in can_be
    has_biases = "biases" not in can_be
    constants = {setting: values[0] for setting, values in can_be.items() if len(values) == 1}
    rotary = RotarySettings(has_windows, "window_rope_base" not in can_be, scalar=is_gemma)
    stack = {
        **tensors_of(_QK_NORMS | (_GEMMA_NORMS if is_gemma else _NORMS)),
        **tensors_of(_MATRICES, "weight", *(("bias",) if has_biases else ())),
    }

    def config_to_hf(config: DecoderOnlyConfig) -> Json:
        further = rotary.to_theirs(config, config, config.num_layers)
        if has_biases:
            further |= {"attention_bias": config.biases, "mlp_bias": config.biases}
        if has_windows and not is_gemma:
            further |= {"use_sliding_window": config.sliding_window is not None}
        return further

    def config_from_hf(settings: Json, tensors: State) -> Json:
        ours = {**vocabulary(settings, pad_id=settings["eos_token_id"]), **constants, **rotary.to_ours(settings)}
        if has_biases:
            if settings["attention_bias"] != settings["mlp_bias"]:
                raise UserError("attention_bias and mlp_bias differ: our models have both kinds of biases or none")
            ours["biases"] = settings["attention_bias"]
        return ours

    return HFModel(
        config_class=DecoderOnlyConfig,
        model_type=model_type,
        class_name=class_name,
        name=name,
        settings={
            **_SETTINGS,
            **{ours: theirs for ours, theirs in _CAPS.items() if ours not in can_be},
            "activation": Choice("hidden_activation" if is_gemma else "hidden_act", ACTIVATIONS),
        },
        names={**_OUTSIDE, **within("decoder.layers.{}", "model.layers.{}", stack)},
        config_to_hf=config_to_hf,
        config_from_hf=config_from_hf,
        keys=KEYS,
        fixed=fixed,
        can_be=can_be,
    )


_NO_BIAS = {"attention_bias": False}
_LLAMA = {**_PLAIN, "qk_norm": (False,), "sliding_window": (None,)}
_QWEN3 = {**_PLAIN, "qk_norm": (True,), "biases": (False,)}
_GEMMA2 = {**_GEMMA, "qk_norm": (False,), "window_rope_base": (None,)}
_GEMMA3 = {**_GEMMA, "qk_norm": (True,), "attention_softcap": (None,)}
HF_MODELS = (
    _GPT2,
    rotary_model("Llama", "llama", "LlamaForCausalLM", _LLAMA, {}),
    rotary_model("Qwen3", "qwen3", "Qwen3ForCausalLM", _QWEN3, _NO_BIAS),
    rotary_model("Gemma 2", "gemma2", "Gemma2ForCausalLM", _GEMMA2, _NO_BIAS, is_gemma=True),
    rotary_model(
        "Gemma 3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA3,
        {**_NO_BIAS, "use_bidirectional_attention": False},
        is_gemma=True,
    ),
)
