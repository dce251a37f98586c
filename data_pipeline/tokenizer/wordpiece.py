"""WordPiece as in BERT (Devlin et al. 2018): words and their continuations, which begin with ##, the longest first.

Tokens such as "[CLS]" never match text: text that spells them is split at its brackets.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.json_file import read_json
from data_pipeline.text.vocabulary import Vocabulary
from data_pipeline.tokenizer.text_model import TextModel, ends_sentence, parts, read_file

LISTING, SETTINGS = "vocab.txt", "wordpiece.json"
PREFIX = "##"
LONGEST_WORD = 100  # characters; a longer one is unknown
MARKS = PAD, UNK, BEGIN, END, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
_NO_TEXT = re.compile(r"\[(?:PAD|UNK|CLS|SEP|MASK|unused\d+)\]")


@dataclass(frozen=True)
class Normalization:
    """What happens to text before it is split. `strip_accents`: None means as `lowercase`."""

    lowercase: bool = True
    strip_accents: bool | None = None
    handle_chinese_chars: bool = True
    clean_text: bool = True


class WordPiece(TextModel):
    """`tokens` are in the order of their ids."""

    kind = "wordpiece"
    glue = " "

    def __init__(self, tokens: list[str], normalization: Normalization, origin: str | Path):
        """`origin` names the model in error messages. Raises UserError for a list that isn't BERT's."""
        self._tokens, self.normalization = tokens, normalization
        self._ids = {token: id_ for id_, token in enumerate(tokens)}
        if len(self._ids) < len(tokens):
            raise UserError(f"{origin}: lists a token twice")
        if missing := [name for name in MARKS if name not in self._ids]:
            raise UserError(f"{origin}: lacks BERT's tokens {', '.join(missing)}")
        self._tokenizer = self.backend()

    @classmethod
    def read(cls, directory: Path) -> "WordPiece":
        """The model in `directory`: vocab.txt, and wordpiece.json or tokenizer_config.json for what changes text first.

        Raises UserError if vocab.txt is missing or isn't BERT's, FailedError if it is damaged.
        """
        path = directory / LISTING
        lines = read_file(path).split("\n")
        tokens = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
        return cls(tokens, _normalization(directory), path)

    @property
    def size(self) -> int:
        return len(self._tokens)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Every token that is no continuation starts a word."""
        text = np.array([_NO_TEXT.fullmatch(token) is None for token in self._tokens])
        of_text = np.flatnonzero(text)
        starts = text & np.array([not token.startswith(PREFIX) for token in self._tokens])
        return Vocabulary(
            size=self.size,
            text=(int(of_text[0]), int(of_text[-1]) + 1) if len(of_text) else (0, 0),
            pad=self._ids[PAD],
            eos=self._ids[END],
            unk=self._ids[UNK],
            bos=self._ids[BEGIN],
            mask=self._ids[MASK],
            special={BEGIN: self._ids[BEGIN], END: self._ids[END]},
            word_starts=starts,
            sentence_ends=text & np.array([ends_sentence(token) for token in self._tokens]),
        )

    @cached_property
    def names(self) -> Mapping[int, str]:
        return {self._ids[name]: name for name in MARKS}

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """Google's list of tokens, and the settings that its own files leave to the name of a model."""
        settings = json.dumps(asdict(self.normalization), indent=1) + "\n"
        return {LISTING: "".join(f"{token}\n" for token in self._tokens).encode(), SETTINGS: settings.encode()}

    @cached_property
    def sha256(self) -> str:
        return fingerprint([self._tokens, asdict(self.normalization)])

    def backend(self) -> tokenizers.Tokenizer:
        """A new tokenizer of the library with this model, which a caller may change."""
        backend = tokenizers.Tokenizer(
            models.WordPiece(
                self._ids,
                unk_token=UNK,
                continuing_subword_prefix=PREFIX,
                max_input_chars_per_word=LONGEST_WORD,
            )
        )
        backend.normalizer = normalizers.BertNormalizer(**asdict(self.normalization))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix=PREFIX)
        return backend

    def has(self, token: str) -> bool:
        return token in self._ids

    def encode(self, texts: list[str]) -> list[list[int]]:
        encode = self._tokenizer.encode  # one text at a time: a batch would use threads that other workers need
        return [[id_ for part in parts(text) for id_ in encode(part).ids] for text in texts]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


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
