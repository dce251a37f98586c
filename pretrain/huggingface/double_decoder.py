"""The block-based double decoder in transformers."""

from pretrain.huggingface.remote import conversion
from pretrain.models import DoubleDecoderConfig

EXPORTED = conversion(
    "double_decoder",
    "double_decoder",
    DoubleDecoderConfig,
    "AutoModelForCausalLM",
    "DoubleDecoderForCausalLM",
    copies={"embedding.weight": ["lm_head.weight"]},
    fixed={"tie_word_embeddings": True},
)
CONVERSIONS = (EXPORTED,)
