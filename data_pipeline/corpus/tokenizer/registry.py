"""All kinds of tokenizers: those that ship, and those of installed packages."""

from typing import Annotated

from data_pipeline.base.config_file import OneOf
from data_pipeline.base.packages import Kinds
from data_pipeline.corpus.tokenizer.config import TokenizerConfig

_HERE = "data_pipeline.corpus.tokenizer"
KINDS = Kinds(
    "tokenizers",
    TokenizerConfig,
    "kind",
    {
        "sentencepiece": f"{_HERE}.sentencepiece_training:SentencePieceConfig",
        "bytes": f"{_HERE}.byt5:BytesConfig",
        "symbols": f"{_HERE}.symbols:SymbolsConfig",
        "bpe": f"{_HERE}.bpe:BPEConfig",
        "ids": f"{_HERE}.ids:IdsConfig",
        "tokenizer_json": f"{_HERE}.tokenizer_json:TokenizerJsonConfig",
    },
)
"""The settings of each kind, by its name."""

AnyTokenizer = Annotated[TokenizerConfig, OneOf("kind", KINDS, default="sentencepiece")]
"""The settings of a tokenizer of any kind; of sentencepiece if they name no kind."""
