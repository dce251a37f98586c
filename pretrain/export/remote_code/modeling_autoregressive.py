"""The autoregressive encoder-decoder (Yan 2024), for scoring and generation.

Encoder and decoder read the same tokens, and all attention is causal. So all attentions cache keys and values, and a
step processes only the new token.
"""

from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration import AutoregressiveConfig
from .layers import Attention, FeedForward, new_norm, real_positions, rotary_embedding, visible


def layer_norm(config):
    return new_norm("layer", config.d_model, 1e-5, config.bias)


class CachedAttention(Attention):
    """Attention with a cache. `index`: the attention's index in the cache."""

    def __init__(self, config, num_heads, bias, index):
        super().__init__(
            {"d_model": config.d_model, "num_heads": num_heads}, bias=bias, dropout_rate=config.dropout_rate
        )
        self.index, self.rotary = index, config.positions == "rotary"

    def attend(self, x, memory, mask, positions, cache):
        """`x` (batch, queries, d_model) attends to the cached tokens and to `memory`, the new tokens."""
        rotary = rotary_embedding(positions, self.width, 10_000.0, x.dtype) if self.rotary else None
        keys, values = self.keys_and_values(memory, rotary)
        if cache is not None:
            keys, values = cache.update(keys, values, self.index)
        return self(x, keys, values, mask, rotary)


class EncoderLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.self_attention_norm = layer_norm(config)
        self.self_attention = CachedAttention(config, config.num_heads, config.bias, index)
        self.feed_forward_norm = layer_norm(config)
        self.feed_forward = FeedForward(config.d_model, config.d_ff or 4 * config.d_model, "gelu", config.bias)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x, *attention_inputs):
        normed = self.self_attention_norm(x)
        x = x + self.dropout(self.self_attention.attend(normed, normed, *attention_inputs))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(EncoderLayer):
    def __init__(self, config, index):
        super().__init__(config, index)
        heads = config.num_cross_heads or 2 * config.num_heads
        bias = config.bias if config.cross_attention_bias is None else config.cross_attention_bias
        self.cross_attention_norm = layer_norm(config)
        self.encoder_norm = layer_norm(config)
        self.cross_attention = CachedAttention(config, heads, bias, index + 1)
        self.cross_attention_first = config.order == "alternate"

    def forward(self, x, encoder_out, *attention_inputs):
        if self.cross_attention_first:
            x = self.attend_across(x, encoder_out, *attention_inputs)
        normed = self.self_attention_norm(x)
        x = x + self.dropout(self.self_attention.attend(normed, normed, *attention_inputs))
        if not self.cross_attention_first:
            x = self.attend_across(x, encoder_out, *attention_inputs)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def attend_across(self, x, encoder_out, *attention_inputs):
        attended = self.cross_attention.attend(
            self.cross_attention_norm(x), self.encoder_norm(encoder_out), *attention_inputs
        )
        return x + self.dropout(attended)


class Bridge(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = layer_norm(config) if config.bridge_norm else nn.Identity()
        self.linear = nn.Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(self, encoder_out):
        return self.linear(self.norm(encoder_out))


class AutoregressiveForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = AutoregressiveConfig
    _supports_sdpa = True
    _input_embed_layer = "embedding"
    _tied_weights_keys = {"lm_head.weight": "embedding.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^embedding_loss\."]  # for further training

    def __init__(self, config):
        super().__init__(config)
        reads_next = config.add_positions or config.subtract_positions != "none"
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned" or reads_next:
            self.position_embedding = nn.Embedding(config.max_positions + reads_next, config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)
        depth = config.num_encoder_layers
        self.encoder = nn.ModuleList(EncoderLayer(config, i) for i in range(depth))
        self.bridge = Bridge(config)
        self.decoder = nn.ModuleList(DecoderLayer(config, depth + 2 * i) for i in range(config.num_decoder_layers))
        self.final_norm = layer_norm(config)
        self.subtracted_norm = layer_norm(config) if config.subtract_positions == "with_norm" else nn.Identity()
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """`input_ids` (batch, length) follow the tokens of `past_key_values`; `attention_mask` (batch, past length +
        length) covers both. `labels` are `input_ids` or -100, and are shifted here. Positions count from the first real
        token.
        """
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = past_key_values if use_cache else None
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None and cache.is_compileable:
            raise ValueError("a static cache is not supported; use the dynamic cache, which is the default")
        past_length, length = cache.get_seq_length() if cache is not None else 0, input_ids.size(1)
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), past_length + length)
        if position_ids is None:
            position_ids = real_positions(attention_mask)[:, past_length:]
        attention_inputs = visible(attention_mask, length, causal=True), position_ids, cache

        x = self.embedding(input_ids)
        if self.config.positions == "learned":
            x = x + self.position_embedding(position_ids)
        x = self.dropout(x)
        for layer in self.encoder:
            x = layer(x, *attention_inputs)
        encoder_out = x
        x = self.bridge(encoder_out)
        if self.config.add_positions:
            x = x + self.position_embedding(position_ids + 1)
        for layer in self.decoder:
            x = layer(x, encoder_out, *attention_inputs)
        x = self.final_norm(x)
        if self.config.subtract_positions != "none":
            x = self.subtracted_norm(x - self.position_embedding(position_ids + 1))
        logits = self.lm_head(x[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
