"""All kinds of tokenizers: those that ship, and those of installed packages."""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from data_pipeline.base.packages import offered
from data_pipeline.corpus.tokenizer.bpe import BPEConfig
from data_pipeline.corpus.tokenizer.byt5 import BytesConfig
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.ids import IdsConfig
from data_pipeline.corpus.tokenizer.sentencepiece_training import SentencePieceConfig
from data_pipeline.corpus.tokenizer.symbols import SymbolsConfig
from data_pipeline.corpus.tokenizer.tokenizer_json import TokenizerJsonConfig

_SHIPPED: tuple[type[TokenizerConfig], ...] = (
    SentencePieceConfig,
    BytesConfig,
    SymbolsConfig,
    BPEConfig,
    IdsConfig,
    TokenizerJsonConfig,
)
KINDS: dict[str, type[TokenizerConfig]] = {kind.model_fields["kind"].default: kind for kind in _SHIPPED}
KINDS |= offered("tokenizers", TokenizerConfig, KINDS, "kind")


def _sentencepiece_by_default(given: Any) -> Any:
    return {"kind": "sentencepiece", **given} if isinstance(given, dict) else given


if TYPE_CHECKING:
    AnyTokenizer = TokenizerConfig
else:
    AnyTokenizer = Annotated[
        reduce(or_, KINDS.values()), Field(discriminator="kind"), BeforeValidator(_sentencepiece_by_default)
    ]
    """The settings of a tokenizer of any kind; of sentencepiece if they name no kind."""
