"""The block-based double decoder (arXiv 2605.18807), for scoring, generation and training.

The encoder is causal over the whole row. The decoder reads the same tokens: with one softmax, each attends to those of
its own block up to itself, and to the encoder's states of earlier blocks and of the first token. In whole rows the
blocks are equally long. In generation the last token of the prompt begins a block; the encoder reads the others at
once, and each block when it is full.
"""

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration import Config
from .layers import Attention, FeedForward, new_norm, real_positions, rotary_embedding, visible


class DoubleDecoderConfig(Config):
    model_type = "double_decoder"
    attribute_map = {**Config.attribute_map, "num_hidden_layers": "num_decoder_layers"}

    d_model: int = 768
    d_ff: int = 3072
    num_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    query_pre_attn_scalar: int | None = None
    num_encoder_layers: int = 8
    num_decoder_layers: int = 4
    least_boundaries: int = 2
    most_boundaries: int = 7
    block_length: int = 128
    activation: str = "gelu"
    rope_base: float = 10_000.0
    layer_norm_epsilon: float = 1e-6


class BlockCache:
    """The state of generation: keys and values of the encoder's layers, and of the decoder's for the tokens of the
    block (`own`) and for the encoder's states (`across`).

    Of `length` tokens the encoder has read `encoded`, and not yet `unread` (batch, tokens). The block begins at
    `start`.
    """

    def __init__(self):
        self.encoder, self.own, self.across = DynamicCache(), DynamicCache(), DynamicCache()
        self.unread = torch.empty(0, 0, dtype=torch.long)
        self.length = self.encoded = self.start = 0

    def get_seq_length(self, layer_idx=0):
        return self.length

    def reorder_cache(self, beam_idx):
        for cache in (self.encoder, self.own, self.across):
            cache.reorder_cache(beam_idx)
        self.unread = self.unread.index_select(0, beam_idx)


class Layer(nn.Module):
    """`index` is the index of its keys and values, `name` that of the attention."""

    def __init__(self, config, index, name):
        super().__init__()
        self.index, self.name = index, name
        self.add_module(name, Attention(config.to_dict(), dropout_rate=config.dropout_rate))
        self.add_module(f"{name}_norm", new_norm("rms", config.d_model, config.layer_norm_epsilon))
        self.feed_forward_norm = new_norm("rms", config.d_model, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x, mask, rotary, keys_and_values):
        """`keys_and_values(i, keys, values)`: those that `x` attends to in layer i, given those of itself."""
        attention, normed = getattr(self, self.name), getattr(self, f"{self.name}_norm")(x)
        keys, values = keys_and_values(self.index, *attention.keys_and_values(normed, rotary))
        x = x + self.dropout(attention(normed, keys, values, mask, rotary))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Stack(nn.Module):
    def __init__(self, config, num_layers, attention_name, norm):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, i, attention_name) for i in range(num_layers))
        self.final_norm = new_norm(norm, config.d_model, config.layer_norm_epsilon, bias=True)

    def forward(self, x, mask, rotary, keys_and_values):
        for layer in self.layers:
            x = layer(x, mask, rotary, keys_and_values)
        return self.final_norm(x)


class DoubleDecoderForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = DoubleDecoderConfig
    _supports_sdpa = True
    _input_embed_layer = "embedding"
    _tied_weights_keys = {"lm_head.weight": "embedding.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.head_width = config.head_dim or config.d_model // config.num_heads
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.encoder = Stack(config, config.num_encoder_layers, "attention", "layer")
        self.decoder = Stack(config, config.num_decoder_layers, "self_attention", "rms")
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `forward` makes a cache of its own kind

    def prepare_inputs_for_generation(self, input_ids, use_cache=True, **kwargs):
        if not use_cache:
            raise ValueError("generation needs use_cache=True: the blocks of whole rows move with every new token")
        return super().prepare_inputs_for_generation(input_ids, use_cache=use_cache, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: BlockCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Whole rows, unless `use_cache` is True: then as in generation, with the logits of a prompt's last token only.

        With a cache, `input_ids` (batch, length) follow its tokens; `attention_mask` (batch, past length + length) has
        those too, and padding is on the left. `labels` are `input_ids` or -100, shifted here, and for whole rows.
        """
        cache, past_length = past_key_values, past_key_values.length if past_key_values is not None else 0
        mask = attention_mask
        if mask is None:
            mask = input_ids.new_ones(len(input_ids), past_length + input_ids.size(1))
        if labels is not None or not (cache is not None if use_cache is None else use_cache):
            cache, states = None, self.whole_rows(input_ids, mask)
        else:
            cache = BlockCache() if cache is None else cache
            steps = input_ids.split(1, dim=1) if past_length else [input_ids]
            states = torch.cat([self.step(ids, mask[:, : cache.length + ids.size(1)], cache) for ids in steps], dim=1)
        logits, loss = self.lm_head(states), None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def whole_rows(self, ids, mask):
        config, positions = self.config, real_positions(mask)
        least, most = config.least_boundaries, config.most_boundaries
        count = (least + most) // 2
        shares = torch.tensor([(number + 1) / (count + 1) for number in range(count)], device=ids.device)
        if self.training:
            shares = torch.rand(int(torch.randint(least, most + 1, ())), device=ids.device)
        lengths = mask.bool().sum(dim=1)[:, None, None]
        boundaries = 2 + (shares * (lengths - 3)).long()
        blocks = ((positions[..., None] >= boundaries) & (lengths >= 4)).sum(dim=-1)
        queries, keys, first = blocks[:, None, :, None], blocks[:, None, None], positions[:, None, None] == 0

        x = self.dropout(self.embedding(ids))
        rotary, causal = self.rotary(positions, x), visible(mask, ids.size(1), causal=True)
        states = self.encoder(x, causal, rotary, lambda i, *own: own)

        def with_states(i, *own):
            across = self.across(i, states, rotary)
            return (torch.cat(both, dim=2) for both in zip(own, across, strict=True))

        seen = torch.cat([causal & (keys == queries), causal & ((keys < queries) | first)], dim=-1)
        return self.decoder(x, seen, rotary, with_states)

    def step(self, ids, mask, cache):
        """The state (batch, 1, d_model) of the last of `ids`: a prompt, or a token after the cache's."""
        positions = real_positions(mask)
        if cache.length == 0:
            self.read(ids, mask, positions, cache)
            cache.unread, cache.start = ids[:, :0], ids.size(1) - 1
        else:
            if cache.length - cache.start == self.config.block_length:
                if cache.unread.size(1):
                    self.read(cache.unread, mask, positions, cache)
                cache.unread, cache.start, cache.own = ids[:, :0], cache.length, DynamicCache()
            cache.unread = torch.cat([cache.unread, ids], dim=1)
        cache.length = mask.size(1)

        def with_states(i, *own):
            across = cache.across.layers[i].keys, cache.across.layers[i].values
            return (torch.cat(both, dim=2) for both in zip(cache.own.update(*own, i), across, strict=True))

        x = self.dropout(self.embedding(ids[:, -1:]))
        read = slice(cache.encoded)
        earlier = torch.arange(cache.encoded, device=ids.device) < cache.start
        across = mask[:, read].bool() & (earlier | (positions[:, read] == 0))
        own = across.new_ones(len(across), cache.length - cache.start)
        seen = torch.cat([own, across], dim=1)[:, None, None]
        return self.decoder(x, seen, self.rotary(positions[:, -1:], x), with_states)

    def read(self, ids, mask, positions, cache):
        """Encodes `ids`, which follow those that the encoder has read, for all layers of the decoder."""
        new = slice(cache.encoded, cache.encoded + ids.size(1))
        cache.encoded = new.stop
        x = self.dropout(self.embedding(ids))
        rotary, causal = self.rotary(positions[:, new], x), visible(mask[:, : new.stop], ids.size(1), causal=True)
        states = self.encoder(x, causal, rotary, lambda i, *own: cache.encoder.update(*own, i))
        for i in range(self.config.num_decoder_layers):
            cache.across.update(*self.across(i, states, rotary), i)

    def across(self, i, states, rotary):
        """The keys and values of the encoder's states in layer i of the decoder."""
        return self.decoder.layers[i].self_attention.keys_and_values(states, rotary)

    def rotary(self, positions, x):
        return rotary_embedding(positions, self.head_width, self.config.rope_base, x.dtype)
