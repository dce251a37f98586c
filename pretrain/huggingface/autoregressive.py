"""The autoregressive encoder-decoder in transformers.

The weights include those of the embedding loss, for further training; transformers ignores these.
"""

from pretrain.huggingface.conversion import Json, State, shapes
from pretrain.huggingface.remote import conversion
from pretrain.models import AutoregressiveConfig

LOSS = "embedding_loss"


def to_ours(settings: Json, tensors: State) -> Json:
    """If transformers has saved the model again, the embedding loss's weights are gone; the config then drops it."""
    ours = {name: settings[name] for name in EXPORTED.settings}
    loss_weights = {name for name in shapes(AutoregressiveConfig(vocab_size=1, **ours)) if name.startswith(f"{LOSS}.")}
    return {LOSS: None} if loss_weights and loss_weights.isdisjoint(tensors) else {}


EXPORTED = conversion(
    "autoregressive",
    "autoregressive_encoder_decoder",
    AutoregressiveConfig,
    "AutoModelForCausalLM",
    "AutoregressiveForCausalLM",
    copies={"embedding.weight": ["lm_head.weight"]},
    last_norm=lambda config: {"none": "final_norm", "with_norm": "subtracted_norm"}.get(config.subtract_positions),
    fixed={"tie_word_embeddings": True},
    to_ours=to_ours,
)
CONVERSIONS = (EXPORTED,)
