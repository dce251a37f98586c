"""Exports for other engines: the same model, as the engine's converter reads it right."""

from collections.abc import Mapping

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.sentencepiece import SentencePiece
from pretrain.huggingface.interchange import Interchange, shapes
from pretrain.models import ModelConfig

TRANSFORMERS, CTRANSLATE2, LLAMA_CPP = "transformers", "ctranslate2", "llama.cpp"
ENGINES = (TRANSFORMERS, CTRANSLATE2, LLAMA_CPP)


def rewritten(
    interchange: Interchange, state: Mapping[str, Tensor], config: ModelConfig, tokenizer: Tokenizer, engine: str
) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """Weights and config of the same model for `engine`, without the rows that pad the vocabulary.

    transformers learns from generation_config.json that these rows are no tokens; other engines would generate them.
    Raises UserError if the engine can't run the model.
    """
    if engine == TRANSFORMERS:
        return state, config
    if engine not in interchange.engines:
        able = ", ".join((TRANSFORMERS, *interchange.engines))
        raise UserError(f"--for: models of the family {config.family} can be exported for {able}, not for {engine!r}")
    if engine == LLAMA_CPP and not isinstance(tokenizer.model, SentencePiece):
        raise UserError(f"--for {engine}: its converter needs a sentencepiece tokenizer, not {tokenizer.model.kind}")
    state, config = interchange.engines[engine](state, config)
    config = config.model_copy(update={"pad_vocab_to_multiple_of": 1})
    return {name: state[name][: shape[0]] for name, shape in shapes(config).items()}, config
