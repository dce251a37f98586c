"""The config of the block-based double decoder."""

from transformers import PreTrainedConfig


class DoubleDecoderConfig(PreTrainedConfig):
    model_type = "double_decoder"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_decoder_layers",
    }

    vocab_size: int = 50257
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
    dropout_rate: float = 0.0
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True
