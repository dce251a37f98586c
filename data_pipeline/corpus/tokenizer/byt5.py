"""The bytes of UTF-8 as tokens, with ByT5's ids (Xue et al. 2022): pad 0, eos 1, unk 2, then byte + 3.

The sentinels follow as in transformers' `ByT5Tokenizer`: sentinel k has the id 259 + k. Every text decodes to itself.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.json_file import read_json
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.text_model import TextModel, ends_sentence, starts_word
from data_pipeline.text.vocabulary import Vocabulary

PAD, EOS, UNK = 0, 1, 2
OFFSET = 3  # the id of byte 0
SIZE = OFFSET + 256
MODEL = "tokenizer_config.json"
CLASS = "ByT5Tokenizer"
_NAMES = ("<pad>", "</s>", "<unk>")


class Bytes(TextModel):
    kind = "bytes"
    file_names = (MODEL,)
    gap = ""
    sentinels_ascend = True
    size = SIZE
    names: Mapping[int, str] = dict(enumerate(_NAMES))
    sha256 = fingerprint([CLASS, SIZE])
    files: Mapping[str, bytes] = {MODEL: json.dumps({"tokenizer_class": CLASS, "extra_ids": 0}).encode() + b"\n"}

    @classmethod
    def read(cls, directory: Path) -> "Bytes":
        path = directory / MODEL
        try:
            found = read_json(path, dict)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file or directory") from None
        if found.get("tokenizer_class") != CLASS:
            raise FailedError(f"{path}: damaged: tokenizer_class is {found.get('tokenizer_class')!r}, not {CLASS}")
        return cls()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """White space starts a word. The bytes of a character above U+007F have no text of their own."""
        texts = [""] * OFFSET + [chr(byte) if byte < 128 else "" for byte in range(256)]
        return Vocabulary(
            size=SIZE,
            text=(OFFSET, SIZE),
            pad=PAD,
            eos=EOS,
            unk=UNK,
            word_starts=np.array([*map(starts_word, texts)]),
            sentence_ends=np.array([*map(ends_sentence, texts)]),
            texts=tuple(texts),
        )

    @property
    def token_bytes(self) -> list[bytes]:
        return [b""] * OFFSET + [bytes([byte]) for byte in range(256)]

    def has(self, token: str) -> bool:
        return token in _NAMES

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self.encode_to_arrays(texts)]

    def encode_to_arrays(self, texts: list[str]) -> list[np.ndarray]:
        encoded = (text.encode(errors="surrogatepass") for text in texts)
        return [np.add(np.frombuffer(content, np.uint8), OFFSET, dtype=np.uint16) for content in encoded]

    def backend(self) -> tokenizers.Tokenizer:
        """BPE without a merge, in which each byte is GPT-2's character for it."""
        ids = dict(zip((*_NAMES, *gpt2s_characters()), range(SIZE), strict=True))
        backend = tokenizers.Tokenizer(models.BPE(ids, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return backend

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; � for bytes that are no UTF-8."""
        return bytes(id_ - OFFSET for id_ in ids).decode(errors="replace")


def gpt2s_characters() -> list[str]:
    """The character for each byte: itself if it is visible, else the next one from U+0100 on."""
    visible = [33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174 for byte in range(256)]
    others = count(256)
    return [chr(byte if shows else next(others)) for byte, shows in enumerate(visible)]


class BytesConfig(TokenizerConfig):
    """The bytes of UTF-8, with ByT5's ids: pad 0, eos 1, unk 2, byte + 3, then the sentinels, `<extra_id_0>` first.
    Nothing is trained, and every text comes back to the byte."""

    model: ClassVar[type[TextModel]] = Bytes
    tokens_per_byte: ClassVar[float] = 1.0

    kind: Literal["bytes"] = "bytes"

    def existing(self) -> Bytes:
        return Bytes()
