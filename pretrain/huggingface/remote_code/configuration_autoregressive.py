"""The config of the autoregressive encoder-decoder (Yan 2024)."""

from transformers import PreTrainedConfig


class AutoregressiveConfig(PreTrainedConfig):
    """The config with which the model was trained. `embedding_loss` is for training only; nothing here reads it."""

    model_type = "autoregressive_encoder_decoder"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "max_positions",
    }

    vocab_size: int = 50257
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
    dropout_rate: float = 0.0
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        # The number of layers in the cache: each decoder layer has two attentions, and both have growing caches.
        self.num_hidden_layers = self.num_encoder_layers + 2 * self.num_decoder_layers
        kwargs.pop("num_hidden_layers", None)
        super().__post_init__(**kwargs)
