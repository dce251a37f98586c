"""The modern and the vanilla encoder-decoder, for scoring, generation and training."""

import functools

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from .configuration import ModernConfig, VanillaConfig
from .layers import Attention, FeedForward, new_norm, real_positions, rotary_embedding, visible


class Layer(nn.Module):
    """Sublayers, each with norms: x + after(sublayer(norm(x))), or post-norm, norm(x + sublayer(x)).

    `stack`: the stack's section. `index`: the layer's index in the caches. `memory_width`: the width of the states for
    cross-attention; None: no cross-attention.
    """

    def __init__(self, config, stack, index, memory_width=None):
        super().__init__()
        self.index, self.post_norm = index, config.post_norm
        head_norm = None
        if config.qk_norm:
            kind = "rms" if config.norm == "layer" else config.norm
            head_norm = functools.partial(new_norm, kind, epsilon=config.layer_norm_epsilon)
        options = config.biases, config.attention_dropout_rate, config.attention_softcap, head_norm
        self.self_attention = Attention(stack, None, *options)
        if memory_width:
            self.cross_attention = Attention(stack, memory_width, *options)
        dropout_rate = getattr(config, "activation_dropout_rate", config.dropout_rate)
        self.feed_forward = FeedForward(stack["d_model"], stack["d_ff"], config.activation, config.biases, dropout_rate)
        norms = ("norm", "norm_after") if config.norm_after else ("norm",)
        for name in [f"{sublayer}_{norm}" for sublayer, _ in self.named_children() for norm in norms]:
            self.add_module(name, new_norm(config.norm, stack["d_model"], config.layer_norm_epsilon, config.biases))
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x, mask, rotary, cache=None, memory=None):
        """`memory`: the encoder's states, their mask, and the rotary embeddings of `x` and of the states."""
        x = self.add("self_attention", x, lambda x: self.attend(x, mask, rotary, cache))
        if memory is not None:
            x = self.add("cross_attention", x, lambda x: self.attend_across(x, memory, cache))
        return self.add("feed_forward", x, self.feed_forward)

    def add(self, name, x, sublayer):
        norm, after = getattr(self, f"{name}_norm"), getattr(self, f"{name}_norm_after", nn.Identity())
        if self.post_norm:
            return norm(x + self.dropout(sublayer(x)))
        return x + self.dropout(after(sublayer(norm(x))))

    def attend(self, x, mask, rotary, cache):
        keys, values = self.self_attention.keys_and_values(x, rotary)
        if cache is not None:
            keys, values = cache.self_attention_cache.update(keys, values, self.index)
        return self.self_attention(x, keys, values, mask, rotary)

    def attend_across(self, x, memory, cache):
        states, mask, rotary, memory_rotary = memory
        if cache is not None and cache.is_updated.get(self.index):  # the states are projected once
            stored = cache.cross_attention_cache.layers[self.index]
            keys, values = stored.keys, stored.values
        else:
            keys, values = self.cross_attention.keys_and_values(states, memory_rotary)
            if cache is not None:
                cache.cross_attention_cache.update(keys, values, self.index)
                cache.is_updated[self.index] = True
        return self.cross_attention(x, keys, values, mask, rotary)


class Stack(nn.Module):
    """The encoder or, with a `memory_width`, the causal decoder."""

    main_input_name = "input_ids"  # `generate` asks the encoder

    def __init__(self, config, stack, memory_width=None):
        super().__init__()
        d_model = stack["d_model"]
        self.config, self.causal = config, memory_width is not None
        self.head_width = stack.get("head_dim") or d_model // stack["num_heads"]
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, d_model)
        self.layers = nn.ModuleList(Layer(config, stack, i, memory_width) for i in range(stack["num_layers"]))
        self.final_norm = nn.Identity()
        if not config.post_norm:
            self.final_norm = new_norm(config.norm, d_model, config.layer_norm_epsilon, config.biases)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x, mask=None, states=None, states_mask=None, cache=None):
        """Maps token vectors (batch, length, d_model) to states. With a cache, `x` follows its tokens, and `mask`
        (batch, past length + length) covers them too."""
        config, length = self.config, x.size(1)
        past_length = cache.get_seq_length() if cache is not None else 0
        if mask is None or not self.causal:
            positions = torch.arange(past_length, past_length + length, device=x.device)[None]
        else:
            positions = real_positions(mask)[:, past_length:]
        mask = x.new_ones(1, past_length + length) if mask is None else mask
        x = self.with_positions(x, positions)

        def rotary_of(positions, base, factor):
            return rotary_embedding(positions, self.head_width, base, x.dtype, factor)

        memory = None
        if states is not None:
            columns = torch.arange(states.size(1), device=x.device)[None]
            states_mask = torch.ones_like(columns) if states_mask is None else states_mask
            both = None, None
            if config.cross_rotation:  # positions continue after each row's input
                positions = positions + ((states_mask != 0) * (columns + 1)).amax(dim=1, keepdim=True)
                rotation = config.rope_base, config.rope_factor
                both = rotary_of(positions, *rotation), rotary_of(columns, *rotation)
            memory = states, visible(states_mask, 1), *both

        @functools.cache
        def mask_and_rotary(window, base, factor):  # made once for all layers of a kind
            rotary = rotary_of(positions, base, factor) if config.positions == "rotary" else None
            return visible(mask, length, self.causal, window), rotary

        for i, layer in enumerate(self.layers):
            x = layer(x, *mask_and_rotary(*config.kind(i)), cache, memory)
        return x if config.post_norm else self.dropout(self.final_norm(x))

    def with_positions(self, x, positions):
        if self.config.scale_embedding:
            x = x * x.new_full((), x.size(-1) ** 0.5)  # rounded to the dtype of `x`
        if self.config.positions == "learned":
            x = x + self.positions(positions)
        if self.config.positions == "sinusoidal":
            x = x + sinusoids(positions, x.size(-1)).to(x.dtype)
        return self.dropout(x)


def sinusoids(positions, width):
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * 10_000.0 ** (-steps / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


class TokenEncoder(nn.Module):
    """The encoder with its embedding."""

    def __init__(self, embedding, encoder):
        super().__init__()
        self.embedding, self.encoder = embedding, encoder

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return BaseModelOutput(last_hidden_state=self.encoder(self.embedding(input_ids), attention_mask))


class ModernForConditionalGeneration(PreTrainedModel, GenerationMixin):
    config_class = ModernConfig
    _supports_sdpa = True
    _input_embed_layer = "embedding"

    def __init__(self, config):
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # cross-entropy of labels as they are, not shifted
        encoder, decoder = config.encoder, config.decoder
        self.embedding = nn.Embedding(config.vocab_size, encoder["d_model"])
        self.decoder_embedding = None
        if config.tie_embeddings != "all":
            self.decoder_embedding = nn.Embedding(config.vocab_size, decoder["d_model"])
        self.encoder = Stack(config, encoder)
        self.decoder = Stack(config, decoder, encoder["d_model"])
        self.lm_head = nn.Linear(decoder["d_model"], config.vocab_size, bias=False)
        if tied := {"all": "embedding", "output": "decoder_embedding"}.get(config.tie_embeddings):
            self._tied_weights_keys = {"lm_head.weight": f"{tied}.weight"}
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `forward` makes the cache: transformers' cache would apply windows to cross-attention too

    def get_encoder(self, modality=None):
        return TokenEncoder(self.embedding, self.encoder)

    def prepare_decoder_input_ids_from_labels(self, labels):
        """The labels shifted right, after the start: [5, 6, 1, -100] → [0, 5, 6, 1]."""
        shifted = labels.roll(1, dims=1).masked_fill(labels.roll(1, dims=1) == -100, self.config.pad_token_id)
        shifted[:, 0] = self.config.pad_token_id
        return shifted

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> Seq2SeqLMOutput:
        """`decoder_input_ids` (batch, length) follow the tokens of `past_key_values`; default: the `labels` shifted
        right. `decoder_attention_mask` (batch, past length + length) is needed only for padding on the left."""
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask)
        if decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        past = past_key_values if use_cache else None
        if use_cache and past is None:
            past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        states = encoder_outputs[0]
        x = (self.decoder_embedding or self.embedding)(decoder_input_ids)
        x = self.decoder(x, decoder_attention_mask, states, attention_mask, past)
        logits = self.lm_head(x[:, -logits_to_keep:])
        if cap := self.config.output_softcap:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return Seq2SeqLMOutput(loss=loss, logits=logits, past_key_values=past, encoder_last_hidden_state=states)


class VanillaForConditionalGeneration(ModernForConditionalGeneration):
    config_class = VanillaConfig
