"""The decoder-only model in transformers, where it has the layers of Llama, Qwen3, Gemma 2 or Gemma 3."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.blocks import (
    ACTIVATIONS,
    KEYS,
    heads_to_ours,
    heads_to_theirs,
    rotations_to_ours,
    rotations_to_theirs,
    scalar_to_ours,
    windows_to_ours,
    windows_to_theirs,
)
from pretrain.huggingface.interchange import (
    Exported,
    Interchange,
    State,
    drop_copies,
    one_of,
    renamed,
    to_ours,
    to_theirs,
)
from pretrain.huggingface.json_files import Json
from pretrain.models import DecoderOnlyConfig

SETTINGS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "dropout_rate": "attention_dropout",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "decoder.final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
PARTS = {
    **{f"attention.{matrix}": f"self_attn.{matrix}_proj" for matrix in "qkvo"},
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.wi_0": "mlp.gate_proj",
    "feed_forward.wi_1": "mlp.up_proj",
    "feed_forward.wo": "mlp.down_proj",
    "attention_norm": "input_layernorm",
}
NORMS_BEFORE = {"feed_forward_norm": "post_attention_layernorm"}
NORMS_BEFORE_AND_AFTER = {
    "attention_norm_after": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_norm_after": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Form:
    """A model of transformers.

    - `can_be`: our settings, each with the values that the model can have, as in `Interchange`.
    - `norms`: the names of those norms that differ between the models.
    - `activation`: the name of that setting.
    - `own_to_theirs`, `own_to_ours`: settings that only some of the models have.
    """

    name: str
    model_type: str
    class_name: str
    can_be: Mapping[str, tuple]
    norms: Mapping[str, str]
    activation: str
    own_to_theirs: Callable[[DecoderOnlyConfig], Json]
    own_to_ours: Callable[[Json], Json]
    fixed: Mapping[str, object] = field(default_factory=dict)

    @property
    def interchange(self) -> Interchange:
        return Interchange(
            self.model_type,
            self.class_name,
            partial(to_hugging_face, self),
            partial(from_hugging_face, self),
            {**KEYS, **SETTINGS},
            name=self.name,
            can_be=self.can_be,
            fixed=self.fixed,
            last_norm=lambda config: "decoder.final_norm",
        )

    def theirs(self, name: str) -> str:
        """The name that transformers gives to one of our tensors.

        decoder.layers.3.attention.q.weight → model.layers.3.self_attn.q_proj.weight
        """
        if name in NAMES:
            return NAMES[name]
        _, _, number, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        return f"model.layers.{number}.{({**PARTS, **self.norms})[part]}.{kind}"


def to_hugging_face(form: Form, state_dict: Mapping[str, Tensor], config: DecoderOnlyConfig) -> Exported:
    if config.d_model % config.num_heads:
        raise UserError(f"transformers has no {form.name} whose num_heads doesn't divide d_model")
    tensors = {
        form.theirs(name): tensor
        for name, tensor in state_dict.items()
        if not (config.tie_embeddings and name == "lm_head.weight")  # one matrix, stored once
    }
    ids = {"eos_token_id": config.eos_id, "pad_token_id": config.pad_id}
    saved = {
        "architectures": [form.class_name],
        "model_type": form.model_type,
        "vocab_size": config.padded_vocab_size,
        **heads_to_theirs(config),
        **to_theirs(config, SETTINGS),
        form.activation: ACTIVATIONS[config.activation],
        **form.own_to_theirs(config),
        **ids,
    }
    return Exported(tensors, saved, ids)


def from_hugging_face(form: Form, saved: Json, tensors: State) -> tuple[DecoderOnlyConfig, State]:
    """The dropout rate is that of attention weights: in transformers these models have no other dropout."""
    eos, pad = saved["eos_token_id"], saved["pad_token_id"]
    embedding, output = NAMES["embedding.weight"], NAMES["lm_head.weight"]
    if saved["tie_word_embeddings"]:
        drop_copies(tensors, embedding, [output])
        if embedding in tensors:
            tensors[output] = tensors[embedding]
    config = DecoderOnlyConfig.model_validate(
        {
            "vocab_size": saved["vocab_size"],
            "pad_id": eos if pad is None else pad,
            "eos_id": eos,
            "activation": one_of(saved, form.activation, {theirs: ours for ours, theirs in ACTIVATIONS.items()}),
            **{name: values[0] for name, values in form.can_be.items() if len(values) == 1},
            **heads_to_ours(saved),
            **to_ours(saved, SETTINGS),
            **form.own_to_ours(saved),
        }
    )
    return config, renamed(tensors, config, form.theirs)


# ---- what distinguishes the models


def _llama(config: DecoderOnlyConfig) -> Json:
    biases = {"attention_bias": config.biases, "mlp_bias": config.biases}
    return {"rope_parameters": rotations_to_theirs(config.rope_base), **biases}


def _from_llama(saved: Json) -> Json:
    if saved["attention_bias"] != saved["mlp_bias"]:
        raise UserError("attention_bias and mlp_bias differ: our models have both kinds of biases or none")
    return {"rope_base": rotations_to_ours(saved["rope_parameters"]), "biases": saved["attention_bias"]}


def _qwen3(config: DecoderOnlyConfig) -> Json:
    used = {"use_sliding_window": config.sliding_window is not None}
    return {
        "rope_parameters": rotations_to_theirs(config.rope_base),
        **used,
        **windows_to_theirs(config, config.num_layers),
    }


def _from_qwen3(saved: Json) -> Json:
    return {"rope_base": rotations_to_ours(saved["rope_parameters"]), **windows_to_ours(saved)}


def _gemma2(config: DecoderOnlyConfig) -> Json:
    return {
        "rope_parameters": rotations_to_theirs(config.rope_base),
        **windows_to_theirs(config, config.num_layers),
        "query_pre_attn_scalar": config.attention_scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.output_softcap,
    }


def _from_gemma2(saved: Json) -> Json:
    caps = {"attention_softcap": "attn_logit_softcapping", "output_softcap": "final_logit_softcapping"}
    base = rotations_to_ours(saved["rope_parameters"])
    return {"rope_base": base, **windows_to_ours(saved), **to_ours(saved, caps), **scalar_to_ours(saved)}


def _gemma3(config: DecoderOnlyConfig) -> Json:
    bases = {"full_attention": config.rope_base, "sliding_attention": config.window_rope_base or config.rope_base}
    return {
        "rope_parameters": {kind: rotations_to_theirs(base) for kind, base in bases.items()},
        **windows_to_theirs(config, config.num_layers),
        "query_pre_attn_scalar": config.attention_scalar,
        "final_logit_softcapping": config.output_softcap,
    }


def _from_gemma3(saved: Json) -> Json:
    if saved["use_bidirectional_attention"]:
        raise UserError("use_bidirectional_attention is true, but our decoders are causal")
    windows = windows_to_ours(saved)
    local, whole = (rotations_to_ours(saved["rope_parameters"][f"{kind}_attention"]) for kind in ("sliding", "full"))
    own_base = windows["sliding_window"] is not None and local != whole
    return {
        "rope_base": whole,
        "window_rope_base": local if own_base else None,
        "output_softcap": saved["final_logit_softcapping"],
        **windows,
        **scalar_to_ours(saved),
    }


_ALL = {"positions": ("rotary",), "activation": tuple(ACTIVATIONS), "subtract_positions": ("none",)}
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
FORMS = (
    Form(
        "Llama",
        "llama",
        "LlamaForCausalLM",
        {**_PLAIN, "qk_norm": (False,), "sliding_window": (None,)},
        NORMS_BEFORE,
        "hidden_act",
        _llama,
        _from_llama,
    ),
    Form(
        "Qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        {**_PLAIN, "qk_norm": (True,), "biases": (False,)},
        NORMS_BEFORE,
        "hidden_act",
        _qwen3,
        _from_qwen3,
        fixed={"attention_bias": False},
    ),
    Form(
        "Gemma 2",
        "gemma2",
        "Gemma2ForCausalLM",
        {**_GEMMA, "qk_norm": (False,), "window_rope_base": (None,)},
        NORMS_BEFORE_AND_AFTER,
        "hidden_activation",
        _gemma2,
        _from_gemma2,
        fixed={"attention_bias": False},
    ),
    Form(
        "Gemma 3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_GEMMA, "qk_norm": (True,), "attention_softcap": (None,)},
        NORMS_BEFORE_AND_AFTER,
        "hidden_activation",
        _gemma3,
        _from_gemma3,
        fixed={"attention_bias": False},
    ),
)
