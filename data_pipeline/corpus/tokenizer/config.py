"""The settings that all kinds of tokenizers have. A kind is a subclass with its own keys, and makes the kind's model.

A package offers a kind of its own by the entry point `encdec_pretrain.tokenizers`:

    [project.entry-points."encdec_pretrain.tokenizers"]
    nibbles = "my_package:NibblesConfig"
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt, field_validator

from data_pipeline.base.config_file import LocalPath, OneOf, Section
from data_pipeline.base.packages import Kinds
from data_pipeline.corpus.objectives.objective import LONGEST
from data_pipeline.corpus.tokenizer.text_model import TextModel
from data_pipeline.text.vocabulary import Vocabulary


class TokenizerConfig(Section):
    """A tokenizer that is neither trained nor read from a file. A kind has a field `kind` with its name as the default.

    Attributes:
        model: the class of the kind's models.
        tokens_per_byte: tokens for a byte of text, at most about.
        tokens_grow: whether the tokens of a larger trained vocabulary are longer.
        has_text: whether documents are text; False: lists of integers.
    """

    model: ClassVar[type[TextModel]]
    tokens_per_byte: ClassVar[float] = 1 / 3
    tokens_grow: ClassVar[bool] = True
    has_text: ClassVar[bool] = True

    kind: str
    """The kind of tokenizer."""
    special_tokens: list[str] = []
    """Tokens that never match text, such as `<mask>`, `<s>` or `[R]`. Their ids come between the tokens of text and the
    sentinels; with `bytes`, behind the sentinels."""
    sentinels: int = Field(100, ge=0, le=LONGEST)
    """Number of sentinels, the tokens that stand for masked spans."""

    @property
    def is_trained(self) -> bool:
        """Whether the model is made from a sample of the corpus."""
        return False

    def trained_on(self, text_bytes: int) -> int:
        """The size of the training sample in a corpus with `text_bytes` of text; 0 if nothing is trained."""
        return 0

    @property
    def memory(self) -> int:
        """Bytes that training takes for each byte of the sample."""
        return 1

    @property
    def pieces(self) -> int:
        """The number of ids of a model that is trained, at most; else of the model."""
        return self.existing().size

    @property
    def on_unknown(self) -> str:
        """What a user can do about text that is lost as unknown."""
        return "choose a tokenizer that has tokens for this text"

    def existing(self) -> TextModel:
        """The model of a kind that isn't trained. Raises UserError or FailedError for files that can't be used."""
        raise NotImplementedError

    def train(self, sample: Sequence[bytes]) -> TextModel:
        """The model made from texts in UTF-8. The same texts in the same order give the same bytes.

        The last text may be cut inside a character. Raises UserError for settings that the sample doesn't allow.
        """
        raise NotImplementedError

    def expected(self) -> Vocabulary:
        """The vocabulary of the model, before it is trained."""
        return self.existing().vocabulary

    @field_validator("special_tokens")
    @classmethod
    def _names_are_distinct(cls, names: list[str]) -> list[str]:
        for number, name in enumerate(names):
            if not name or any(character.isspace() for character in name):
                raise ValueError(f"a name is empty or has white space: {name!r}")
            if name.startswith("<extra_id_"):
                raise ValueError(f"{name} is a sentinel's name; set the number of sentinels with tokenizer.sentinels")
            if name in names[:number]:
                raise ValueError(f"{name} is listed twice")
        return names

    @property
    def layout(self) -> dict[str, Any]:
        """The settings that loading a tokenizer needs besides its files."""
        return self.model_dump(include={"kind", "special_tokens", "sentinels"})


class TrainedConfig(TokenizerConfig):
    """A tokenizer that is trained on the first training documents in the order of a hash, or read from a file."""

    path: LocalPath | None = None
    """An existing tokenizer: a file, or a directory such as an export's or a corpus's. null: one is made from the
    corpus."""
    sample_documents: PositiveInt = 1_000_000
    """Maximum number of documents to train on."""
    sample_bytes: PositiveInt = 50_000_000
    """Maximum size of the text to train on, in bytes of UTF-8."""

    @property
    def is_trained(self) -> bool:
        return self.path is None

    def trained_on(self, text_bytes: int) -> int:
        return min(self.sample_bytes, text_bytes) if self.is_trained else 0

    @property
    def on_unknown(self) -> str:
        if self.path is None:
            return "add text to the sample (tokenizer.sample_documents, tokenizer.sample_bytes)"
        return f"{self.path} doesn't know this text: choose a tokenizer that does, or train one (path: null)"


_HERE = "data_pipeline.corpus.tokenizer"
KINDS = Kinds(
    "tokenizers",
    TokenizerConfig,
    "kind",
    {
        "sentencepiece": f"{_HERE}.sentencepiece:SentencePieceConfig",
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
