"""WordPiece as in BERT (Devlin et al. 2018): the longest token first; tokens that continue a word begin with ##.

Tokens such as "[CLS]" never match text: text that spells them is split at its brackets.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.config_file import LocalPath
from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import read_json
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.text_model import FastTokenizer, Roles, TextModel, read_file
from data_pipeline.text.vocabulary import Vocabulary

LISTING, SETTINGS = "vocab.txt", "wordpiece.json"
PREFIX = "##"
LONGEST_WORD = 100  # characters; a longer one is unknown
MARKS = PAD, UNK, BEGIN, END, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
_NO_TEXT = re.compile(r"\[(?:PAD|UNK|CLS|SEP|MASK|unused\d+)\]")


@dataclass(frozen=True)
class Normalization:
    """How text is changed before it is split. `strip_accents`: None: as `lowercase`."""

    lowercase: bool = True
    strip_accents: bool | None = None
    handle_chinese_chars: bool = True
    clean_text: bool = True


class WordPiece(FastTokenizer):
    """`tokens` are in the order of their ids."""

    kind = "wordpiece"
    file_names = (LISTING, SETTINGS)

    def __init__(self, tokens: list[str], normalization: Normalization, origin: str | Path):
        """`origin` names the model in error messages. Raises UserError for a list that isn't BERT's."""
        self._tokens, self.normalization = tokens, normalization
        self._ids = {token: id_ for id_, token in enumerate(tokens)}
        if len(self._ids) < len(tokens):
            raise UserError(f"{origin}: lists a token twice")
        if missing := [name for name in MARKS if name not in self._ids]:
            raise UserError(f"{origin}: lacks BERT's tokens {', '.join(missing)}")
        options = {"continuing_subword_prefix": PREFIX, "max_input_chars_per_word": LONGEST_WORD}
        backend = tokenizers.Tokenizer(models.WordPiece(self._ids, unk_token=UNK, **options))
        backend.normalizer = normalizers.BertNormalizer(**asdict(normalization))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix=PREFIX)
        super().__init__(backend, Roles(*(self._ids[name] for name in (PAD, END, UNK, BEGIN, MASK))))

    @classmethod
    def read(cls, directory: Path) -> "WordPiece":
        """The model in `directory`: vocab.txt, and the normalization of wordpiece.json or tokenizer_config.json.

        Raises UserError if vocab.txt is missing or isn't BERT's, FailedError if it is damaged.
        """
        path = directory / LISTING
        lines = read_file(path).split("\n")
        tokens = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
        return cls(tokens, _normalization(directory), path)

    def glue(self, first: int) -> str:
        return " "

    def token_texts(self) -> Iterator[tuple[int, str]]:
        """Every token without ## starts a word."""
        for id_, token in enumerate(self._tokens):
            if not _NO_TEXT.fullmatch(token):
                yield id_, token.removeprefix(PREFIX) if token.startswith(PREFIX) else f" {token}"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return replace(super().vocabulary, special={name: self._ids[name] for name in (BEGIN, END)})

    @cached_property
    def names(self) -> Mapping[int, str]:
        return {self._ids[name]: name for name in MARKS}

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """Google's list of tokens, and the normalization, which Google's files only name in the name of a model."""
        settings = json.dumps(asdict(self.normalization), indent=1) + "\n"
        return {LISTING: "".join(f"{token}\n" for token in self._tokens).encode(), SETTINGS: settings.encode()}

    @cached_property
    def sha256(self) -> str:
        return fingerprint([self._tokens, asdict(self.normalization)])


def _normalization(directory: Path) -> Normalization:
    if (directory / SETTINGS).exists():
        return read_json(directory / SETTINGS, Normalization)
    path = directory / "tokenizer_config.json"  # as transformers names them
    saved = read_json(path, _AsInTransformers) if path.exists() else _AsInTransformers()
    return Normalization(saved.do_lower_case, saved.strip_accents, saved.tokenize_chinese_chars)


@dataclass(frozen=True)
class _AsInTransformers:
    do_lower_case: bool = True
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool = True


class WordPieceConfig(TokenizerConfig):
    """BERT's tokenizer."""

    model: ClassVar[type[TextModel]] = WordPiece

    kind: Literal["wordpiece"] = "wordpiece"
    path: LocalPath
    """The directory of the tokenizer's files."""

    def existing(self) -> WordPiece:
        return WordPiece.read(Path(self.path))
