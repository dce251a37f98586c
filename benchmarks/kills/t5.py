"""The T5 of transformers that three of the programs train."""

from kills import arguments, text
from transformers import T5Config, T5ForConditionalGeneration


def new_t5(dropout: float = 0.1) -> T5ForConditionalGeneration:
    """A T5 v1.1 with random weights; 0.1 is the library's dropout."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=text.VOCABULARY,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            decoder_start_token_id=text.PAD,
            dropout_rate=dropout,
            **arguments.T5,
        )
    )
