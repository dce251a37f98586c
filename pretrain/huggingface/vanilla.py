"""The vanilla Transformer in transformers."""

from pretrain.huggingface.remote import conversion
from pretrain.models import VanillaConfig

EXPORTED = conversion(
    "encoder_decoder",
    "vanilla_encoder_decoder",
    VanillaConfig,
    "AutoModelForSeq2SeqLM",
    "VanillaForConditionalGeneration",
    encoder_decoder=True,
    ends=True,
    copies={"embedding.weight": ["lm_head.weight"]},
    last_norm=lambda config: f"decoder.layers.{config.num_decoder_layers - 1}.feed_forward_norm",
    fixed={"is_encoder_decoder": True, "tie_word_embeddings": True},
)
CONVERSIONS = (EXPORTED,)
