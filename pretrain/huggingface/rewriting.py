"""What is exported: the model without muP, as transformers or another engine's converter reads it right."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.sentencepiece import SentencePiece
from pretrain.huggingface.conversion import Conversion, Exported, check, shapes
from pretrain.models import ModelConfig

TRANSFORMERS, CTRANSLATE2, LLAMA_CPP = "transformers", "ctranslate2", "llama.cpp"
_CLASSIFIER = "next_sentence.classifier.weight"


def exported(
    conversion: Conversion,
    state: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    engine: str,
    encoder_only: bool,
) -> Exported:
    """Raises UserError if weights, config and tokenizer don't fit together, or the engine has no such model."""
    check(shapes(config), state, "the weights don't fit the model")
    if tokenizer.size != config.vocab_size:
        raise UserError(
            f"the tokenizer's {tokenizer.vocab_size} tokens, {len(tokenizer.special_tokens)} special tokens and "
            f"{tokenizer.sentinels} sentinels make {tokenizer.size} ids, "
            f"but the model's vocab_size is {config.vocab_size}"
        )
    if encoder_only and engine == CTRANSLATE2:
        raise UserError(f"--encoder-only: {engine} can't run an encoder by itself")
    if encoder_only and conversion.encoder is None:
        raise UserError(f"--encoder-only: transformers can't load the encoder of a {config.family} by itself")
    state, config = _for_engine(conversion, *without_mup(conversion, state, config), tokenizer, engine)
    model = conversion.to_hugging_face(state, config)
    if encoder_only and conversion.encoder:
        model = conversion.encoder.extract(model)
    bos = {"bos_token_id": tokenizer.vocabulary.bos}
    generation = model.generation_config
    if generation is not None:
        padding = list(range(tokenizer.size, config.padded_vocab_size))
        generation = {**generation, **bos, **({"suppress_tokens": padding} if padding else {})}
    return replace(model, config={**model.config, **bos}, generation_config=generation)


def _for_engine(
    conversion: Conversion, state: Mapping[str, Tensor], config: ModelConfig, tokenizer: Tokenizer, engine: str
) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """Weights and config of the same model for `engine`, without the rows that pad the vocabulary.

    transformers learns from generation_config.json that these rows are no tokens; other engines would generate them.
    Raises UserError if the engine can't run the model.
    """
    if engine == TRANSFORMERS:
        return state, config
    if engine not in conversion.engines:
        able = ", ".join((TRANSFORMERS, *conversion.engines))
        raise UserError(f"--for: models of the family {config.family} can be exported for {able}, not for {engine!r}")
    if engine == LLAMA_CPP and not isinstance(tokenizer.model, SentencePiece):
        raise UserError(f"--for {engine}: its converter needs a sentencepiece tokenizer, not {tokenizer.model.kind}")
    state, config = conversion.engines[engine](state, config)
    config = config.model_copy(update={"pad_vocab_to_multiple_of": 1})
    return {name: state[name][: shape[0]] for name, shape in shapes(config).items()}, config


def without_mup(
    conversion: Conversion, state: Mapping[str, Tensor], config: ModelConfig
) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """Weights and config of the model without muP that computes the same; only such models are in transformers.

    The last norm before the output matrix is multiplied, since that matrix may also be the embedding. Embeddings that
    the standard model multiplies by √m too much are divided by it. If the multipliers are powers of two, every logit is
    the same to the bit; otherwise they differ by rounding. Raises UserError for what the standard model can't express.
    """
    if config.mup is None:
        return state, config
    norm = conversion.last_norm(config)
    if norm is None:
        raise UserError("mup: no norm directly before the output matrix could take the multiplier of the logits")
    weights, root = dict(state), config.widening**0.5
    factor = config.logits_multiplier
    if getattr(config, "scale_embedding", False):
        embeddings = [weights[name] for name in ("embedding.weight", "decoder_embedding.weight") if name in weights]
        scaled = {tensor.data_ptr() for tensor in embeddings}
        if weights["lm_head.weight"].data_ptr() in scaled:
            factor *= root
        weights = {name: tensor / root if tensor.data_ptr() in scaled else tensor for name, tensor in weights.items()}
    around_one = getattr(config, "norm", None) == "rms_around_one"  # gains are 1 + weight
    for name in {f"{norm}.weight", f"{norm}.bias"} & weights.keys():
        if around_one and name.endswith("weight"):
            weights[name] = (weights[name] + 1) * factor - 1
        else:
            weights[name] = weights[name] * factor
    if _CLASSIFIER in weights:
        weights[_CLASSIFIER] = weights[_CLASSIFIER] * config.logits_multiplier
    return weights, config.model_copy(update={"mup": None})
