"""The T5 of today's layers in transformers."""

from pretrain.config.models import StackConfig
from pretrain.huggingface.conversion import TIED, Json, State, drop_copies
from pretrain.huggingface.remote import conversion
from pretrain.models import ModernConfig


def tidy(settings: Json, tensors: State) -> State:
    if original := TIED.get(str(settings["tie_embeddings"])):
        drop_copies(tensors, original, ["lm_head.weight"])
    return tensors


EXPORTED = conversion(
    "encoder_decoder",
    "modern_encoder_decoder",
    ModernConfig,
    "AutoModelForSeq2SeqLM",
    "ModernForConditionalGeneration",
    encoder_decoder=True,
    ends=True,
    tidy=tidy,
    fixed={"is_encoder_decoder": True},
    also_named={name: name for name in StackConfig.model_fields},
)
CONVERSIONS = (EXPORTED,)
