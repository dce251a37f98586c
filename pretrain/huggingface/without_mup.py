"""A model with muP as one without, which is what transformers has: the multiplier of its logits goes into weights."""

from collections.abc import Mapping

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.interchange import Interchange
from pretrain.models import BartConfig, ModelConfig
from pretrain.models.config.base import Widened

_CLASSIFIER = "next_sentence.classifier.weight"


def without_mup(
    interchange: Interchange, state_dict: Mapping[str, Tensor], config: ModelConfig
) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """Weights and config of the standard model that computes the same.

    The last norm before the output matrix is multiplied, since that matrix may also be the embedding. If the multiplier
    is a power of two, every logit is the same to the bit; otherwise they differ by rounding. Raises UserError for what
    the standard model can't express.
    """
    if not isinstance(config, Widened) or config.mup is None:
        return state_dict, config
    if isinstance(config, BartConfig) and config.scale_embedding:
        raise UserError("mup: scale_embedding multiplies by √base_width, but in transformers by √d_model")
    norm = interchange.last_norm and interchange.last_norm(config)
    if norm is None:
        raise UserError("mup: no norm stands directly before the output matrix to take the multiplier of the logits")
    changed = {name for name in (f"{norm}.weight", f"{norm}.bias", _CLASSIFIER) if name in state_dict}
    around_one = getattr(config, "norm", None) == "rms_around_one"  # gains are 1 + weight

    def times(tensor: Tensor) -> Tensor:
        return (tensor + 1) * config.logits_multiplier - 1 if around_one else tensor * config.logits_multiplier

    weights = {name: times(tensor) if name in changed else tensor for name, tensor in state_dict.items()}
    return weights, config.model_copy(update={"mup": None})
