"""What a run file may say under `model:`, one class per family. No torch: the launcher reads these too."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class T5Config(BaseModel):
    """T5 (Raffel et al. 2020); v1.1 and v1.0 differ in `feed_forward` and `tie_embeddings` alone.

    `vocab_size` counts pieces, special tokens and sentinels; None takes it from the corpus, as a run does with `pad_id`
    and `eos_id`. The decoder starts from padding. The embedding matrix has `pad_vocab_to_multiple_of` as the unit of
    its rows: 128 turns T5's 32,100 ids into 32,128 rows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["t5"] = "t5"
    vocab_size: Count | None = None
    pad_id: TokenId = 0
    eos_id: TokenId = 1
    pad_vocab_to_multiple_of: Count = 1
    d_model: Count
    d_kv: Count
    d_ff: Count
    num_heads: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    relative_attention_num_buckets: Annotated[int, Field(ge=4, multiple_of=4)] = 32  # halved by sign, and by exactness
    relative_attention_max_distance: Count = 128
    dropout_rate: Probability = 0.0
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    feed_forward: Literal["gated-gelu", "relu"] = "gated-gelu"
    tie_embeddings: bool = False
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0

    @model_validator(mode="after")
    def _buckets_reach(self) -> Self:
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise ValueError("relative_attention_max_distance must exceed half of relative_attention_num_buckets")
        return self

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not known yet: it comes from the corpus")
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of
