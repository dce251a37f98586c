"""T5Gemma 2, the text part: Zhang et al., "T5Gemma 2: Seeing, Reading, and Understanding Longer" (2025).

Gemma 3's layers, with norms of queries and keys and without soft caps. The decoder has merged attention: the same
matrices make keys and values of the targets so far and of the encoder's states, and one softmax covers both. The
encoder's states have no positions, and no window applies to them. Both embeddings and the output are tied.
"""

import re
from functools import partial

import torch
from torch import Tensor

from pretrain.config.model_config import Rotation
from pretrain.config.models import T5Gemma2Config
from pretrain.models.attention import (
    Attention,
    AttentionInputs,
    AttentionMask,
    KeyValueCache,
    positions_from,
)
from pretrain.models.functional.attention_backends import Visibility, Window, masked
from pretrain.models.layers import Embedding, FeedForward, LayerConfig, grad_barrier
from pretrain.models.model import Head
from pretrain.models.positions import rotary_embedding
from pretrain.models.rotary_hf import HEADS, KEYS, RotarySettings
from pretrain.models.stacks import Caches, Encoder, EncoderDecoder, ResidualLayer, Stack
from pretrain.models.state_dict_adapter import (
    HFModel,
    Json,
    Shapes,
    State,
    drop_tensors,
    refuse_others,
    tensors_of,
    to_ours,
    to_theirs,
    within,
)
from pretrain.models.t5gemma import (
    HF_DROPOUT,
    HF_FIXED,
    HF_FIXED_IN_STACKS,
    HF_STACK,
    decoder_vocabulary,
    layer_config,
    refuse_differences,
    stack_to_hf,
)


def encoder_window(tokens: int) -> Window:
    """A window of `tokens` keys around a query; of an even number, the extra key is after the query."""
    return Window((tokens + 1) // 2 - 1, tokens // 2)


class MergedAttention(Attention):
    """Attention to the targets so far and to the encoder's states, under one softmax. The targets' keys come first."""

    merged = True

    def forward(  # type: ignore[override]
        self, x: Tensor, states: Tensor, mask: AttentionMask, cache: tuple[KeyValueCache, KeyValueCache] | None = None
    ) -> Tensor:
        """`x` (batch, queries, d_model) attends to itself and to `states` (batch, inputs, d_model).

        `merged_bias` makes the mask's bias. With a cache, `x` has the new tokens only.
        """
        x, states = grad_barrier(x), grad_barrier(states)
        queries = self.queries(x, mask.rotary)

        project = partial(self.keys_and_values, x, mask.rotary)
        project_memory = partial(self.keys_and_values, states, mask.memory_rotary)
        own = project() if cache is None else cache[0].update(project)
        memory = project_memory() if cache is None else cache[1].update(project_memory)
        keys, values = (torch.cat(both, dim=2) for both in zip(own, memory, strict=True))
        return self.output(self.attend(queries, keys, values, mask))


def merged_bias(x: Tensor, keys: int, length: int, window: Window | None, inputs: AttentionInputs) -> Tensor:
    """The bias of merged attention to `keys` targets and `length` inputs, for `x` (batch, queries, d_model).

    The bias broadcasts to (batch, heads, queries, keys + length). A query without input attends to no padding instead,
    since it attends to its own token in any case.
    """
    queries = x.size(1)
    segments = inputs.decoder_segment_ids
    memory_segments = inputs.encoder_segment_ids
    own = Visibility(causal=True, window=window, query_segments=segments, key_segments=segments)
    across = Visibility(key_mask=inputs.encoder_attention_mask, query_segments=segments, key_segments=memory_segments)
    targets = own.mask(queries, keys, x.device)
    memory = across.mask(queries, length, x.device, allow_empty=True)
    assert targets is not None
    if memory is None:
        memory = targets.new_ones(1, 1, 1, 1)
    rows = max(targets.size(0), memory.size(0))  # 1 where all rows see the same
    parts = targets.expand(rows, 1, queries, keys), memory.expand(rows, 1, queries, length)
    bias = masked(None, torch.cat(parts, dim=-1), x.dtype)
    assert bias is not None
    return bias


class MergedLayer(ResidualLayer):
    """Merged attention and a feed-forward layer."""

    self_attention: MergedAttention

    def __init__(self, settings: LayerConfig):
        super().__init__(settings, self_attention=MergedAttention(settings), feed_forward=FeedForward(settings))

    def run(
        self, x: Tensor, states: Tensor, mask: AttentionMask, cache: tuple[KeyValueCache, KeyValueCache] | None = None
    ) -> Tensor:
        x = self.add("self_attention", x, states, mask=mask, cache=cache)
        return self.add("feed_forward", x)


class MergedDecoder(Stack):
    """The decoder."""

    causal = True

    def __init__(self, config: T5Gemma2Config):
        layer = layer_config(config, config)
        super().__init__(config, layer, (MergedLayer(layer) for _ in range(config.num_layers)))

    def forward(
        self, x: Tensor, encoder_states: Tensor, inputs: AttentionInputs, cache: Caches | None = None
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows its
        tokens."""
        queries, past_length = x.size(1), cache[0][0].length if cache else 0
        keys = past_length + queries
        positions = positions_from(past_length, queries, x.device, inputs.decoder_positions)
        x = self.add_positions(x, positions)

        def new_mask(window: Window | None, rotation: Rotation) -> AttentionMask:
            bias = merged_bias(x, keys, encoder_states.size(1), window, inputs)
            return AttentionMask(bias, rotary_embedding(positions, self.d_kv, x.dtype, *rotation))

        masks = self.of_layers(new_mask, queries, keys)
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, masks[i], cache[i] if cache else None)
        return self.finished(x, positions)


class T5Gemma2(EncoderDecoder):
    """The model."""

    config: T5Gemma2Config

    def __init__(self, config: T5Gemma2Config):
        rows, std = config.padded_vocab_size, config.init_std
        super().__init__(
            config,
            Embedding(rows, config.d_model, std),
            Encoder(config, layer_config(config, config), config.num_layers, encoder_window),
            MergedDecoder(config),
            Head(config.d_model, rows, std, multiplier=config.logits_multiplier),
            tied=True,
        )


# transformers always builds a vision tower: exports have a tiny one of zeros, imports ignore it.
_ROTARY = RotarySettings(two_bases=True)
_TEXT = "model.encoder.text_model"
_EMBEDDING = f"{_TEXT}.embed_tokens.weight"
HF_NAMES = tensors_of(
    {
        "embedding": f"{_TEXT}.embed_tokens",
        "lm_head": "lm_head.out_proj",
        **within("encoder", _TEXT, HF_STACK),
        **within("decoder", "model.decoder", HF_STACK),
    }
)
_UNUSED = re.compile(r"^(model\.)?encoder\.(vision_tower|multi_modal_projector)\.|\.eoi_embedding$")
_SHARED = {"layer_norm_epsilon": "rms_norm_eps", "init_std": "initializer_range"}
_SAME = (
    "vocab_size",
    *HEADS.values(),
    "num_hidden_layers",
    "query_pre_attn_scalar",
    "hidden_activation",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    *_SHARED.values(),
)
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 14,
    "patch_size": 14,
}


def _config_to_hf(config: T5Gemma2Config) -> Json:
    stack = {**stack_to_hf(config, config, _ROTARY), **to_theirs(config, _SHARED)}
    encoder = {
        "text_config": stack,
        "vision_config": _VISION,
        "mm_tokens_per_image": 1,
        "eoi_token_index": config.padded_vocab_size,  # no id of a text
    }
    return {"encoder": encoder, "decoder": stack, "initializer_range": config.init_std}


def _config_from_hf(settings: Json, tensors: State) -> Json:
    drop_tensors(tensors, _UNUSED.search)
    decoder = settings["decoder"]
    refuse_differences(settings["encoder"]["text_config"], decoder, _SAME)
    refuse_others(decoder, {**HF_FIXED_IN_STACKS, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    return {
        **decoder_vocabulary(settings, decoder["pad_token_id"]),
        **_ROTARY.to_ours(decoder),
        "num_layers": decoder["num_hidden_layers"],
        **to_ours(decoder, _SHARED),
    }


def _unused(saved: Json) -> Shapes:
    """The shapes of the tensors for images."""
    import transformers  # 7 s and 230 MB
    from transformers.models.t5gemma2 import modeling_t5gemma2

    config, encoder = transformers.T5Gemma2Config.from_dict(saved), modeling_t5gemma2.T5Gemma2Encoder
    with torch.device("meta"):
        theirs = encoder(config.encoder).state_dict()
    shapes = {f"model.encoder.{name}": tuple(tensor.shape) for name, tensor in theirs.items()}
    return {name: shape for name, shape in shapes.items() if _UNUSED.search(name)}


HF_MODELS = (
    HFModel(
        config_class=T5Gemma2Config,
        model_type="t5gemma2",
        class_name="T5Gemma2ForConditionalGeneration",
        name="T5Gemma 2",
        settings=HF_DROPOUT,
        names=HF_NAMES,
        config_to_hf=_config_to_hf,
        config_from_hf=_config_from_hf,
        keys={**KEYS, **_SHARED},
        copies={_EMBEDDING: ["model.decoder.embed_tokens.weight", "lm_head.out_proj.weight"]},
        fixed=HF_FIXED,
        unused=_unused,
        ignored={"encoder.vision_config": _VISION},
        ends=True,
    ),
)
