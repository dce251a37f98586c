"""The configs of the exported models."""

from transformers import PreTrainedConfig


class Config(PreTrainedConfig):
    """The settings of all models."""

    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"hidden_size": "d_model", "num_attention_heads": "num_heads"}

    vocab_size: int = 50257
    dropout_rate: float = 0.0
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True


class AutoregressiveConfig(Config):
    """The config of the trained model. `embedding_loss` is for training only; nothing here reads it."""

    model_type = "autoregressive_encoder_decoder"
    attribute_map = {**Config.attribute_map, "max_position_embeddings": "max_positions"}

    d_model: int = 150
    d_ff: int | None = None
    num_heads: int = 5
    num_cross_heads: int | None = None
    num_encoder_layers: int = 13
    num_decoder_layers: int = 13
    positions: str = "learned"
    max_positions: int | None = 200
    bias: bool = False
    cross_attention_bias: bool | None = None
    order: str = "original"
    bridge_norm: bool = False
    subtract_positions: str = "none"
    add_positions: bool = False
    embedding_loss: dict | None = None

    def __post_init__(self, **kwargs):
        # the layers of the cache: each decoder layer has two attentions, whose caches both grow
        self.num_hidden_layers = self.num_encoder_layers + 2 * self.num_decoder_layers
        kwargs.pop("num_hidden_layers", None)
        super().__post_init__(**kwargs)


class EncoderDecoderConfig(Config):
    """The settings of the modern and the vanilla encoder-decoder. The decoder starts from padding."""

    vocab_size: int = 32128
    attention_dropout_rate: float = 0.0
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0

    def get_text_config(self, decoder=None, encoder=None):
        return self  # `encoder` and `decoder` are sections of settings, not configs

    def kind(self, layer):
        """The window of a layer's self-attention (None: full attention), its RoPE base, and the factor by which
        positions are divided."""
        every = self.full_attention_every
        if self.sliding_window is None or (every is not None and (layer + 1) % every == 0):
            return None, self.rope_base, self.rope_factor
        if self.window_rope_base is None:
            return self.sliding_window, self.rope_base, self.rope_factor
        return self.sliding_window, self.window_rope_base, 1.0


class ModernConfig(EncoderDecoderConfig):
    """`encoder` and `decoder` each have d_model, d_ff, num_heads, num_layers, and None or a value for
    num_key_value_heads, head_dim and query_pre_attn_scalar."""

    model_type = "modern_encoder_decoder"
    attribute_map = {"max_position_embeddings": "max_positions"}
    post_norm = False

    encoder: dict | None = None
    decoder: dict | None = None
    activation: str = "swiglu"
    norm: str = "rms"
    norm_after: bool = False
    qk_norm: bool = True
    biases: bool = False
    positions: str = "rotary"
    max_positions: int | None = None
    rope_base: float = 10_000.0
    rope_factor: float = 1.0
    window_rope_base: float | None = None
    cross_rotation: bool = True
    sliding_window: int | None = None
    full_attention_every: int | None = None
    attention_softcap: float | None = None
    output_softcap: float | None = None
    tie_embeddings: str = "all"
    scale_embedding: bool = False
    layer_norm_epsilon: float = 1e-6


class VanillaConfig(EncoderDecoderConfig):
    model_type = "vanilla_encoder_decoder"
    # constants, where the modern encoder-decoder has settings
    post_norm, norm, layer_norm_epsilon, biases = True, "layer", 1e-5, True
    norm_after = qk_norm = cross_rotation = False
    positions, scale_embedding, tie_embeddings = "sinusoidal", True, "all"
    attention_softcap = output_softcap = sliding_window = full_attention_every = rope_base = rope_factor = None

    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    activation: str = "relu"
    activation_dropout_rate: float = 0.0

    encoder = property(lambda self: self.stack(self.num_encoder_layers))
    decoder = property(lambda self: self.stack(self.num_decoder_layers))

    def stack(self, num_layers):
        return {"d_model": self.d_model, "d_ff": self.d_ff, "num_heads": self.num_heads, "num_layers": num_layers}
