"""A model with muP as one without, which is what transformers has: the multiplier of its logits goes into weights."""

from collections.abc import Mapping

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.interchange import Interchange
from pretrain.models import ModelConfig
from pretrain.models.config.t5gemma import Gemma

_CLASSIFIER = "next_sentence.classifier.weight"


def without_mup(
    interchange: Interchange, state_dict: Mapping[str, Tensor], config: ModelConfig
) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """Weights and config of the standard model that computes the same.

    The last norm before the output matrix is multiplied, since that matrix may also be the embedding. Embeddings that
    the standard model multiplies by √m too much are divided by it. If the multipliers are powers of two, every logit is
    the same to the bit; otherwise they differ by rounding. Raises UserError for what the standard model can't express.
    """
    if config.mup is None:
        return state_dict, config
    norm = interchange.last_norm and interchange.last_norm(config)
    if norm is None:
        raise UserError("mup: no norm stands directly before the output matrix to take the multiplier of the logits")
    weights, root = dict(state_dict), config.widening**0.5
    factor = config.logits_multiplier
    if isinstance(config, Gemma) or getattr(config, "scale_embedding", False):
        embeddings = [weights[name] for name in ("embedding.weight", "decoder_embedding.weight") if name in weights]
        scaled = {tensor.data_ptr() for tensor in embeddings}
        if weights["lm_head.weight"].data_ptr() in scaled:
            factor *= root
        weights = {name: tensor / root if tensor.data_ptr() in scaled else tensor for name, tensor in weights.items()}
    for name in (f"{norm}.weight", f"{norm}.bias"):
        if name in weights:
            around_one = name.endswith("weight") and _around_one(config)
            weights[name] = (weights[name] + 1) * factor - 1 if around_one else weights[name] * factor
    if _CLASSIFIER in weights:
        weights[_CLASSIFIER] = weights[_CLASSIFIER] * config.logits_multiplier
    return weights, config.model_copy(update={"mup": None})


def _around_one(config: ModelConfig) -> bool:
    """Whether the gains of norms are 1 + weight."""
    return isinstance(config, Gemma) or getattr(config, "norm", None) == "rms_around_one"
