"""Byte-level BPE (Radford et al. 2019), which the library `tokenizers` trains on a sample of the corpus.

The ids are pad 0, eos 1, the 256 bytes, then the merges. Every text decodes to itself. The result is a tokenizer.json.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import tokenizers
from pydantic import Field, field_validator
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import tokenizer_json
from data_pipeline.corpus.tokenizer.config import TrainedConfig
from data_pipeline.corpus.tokenizer.text_model import Roles, TextModel
from data_pipeline.corpus.tokenizer.tokenizer_json import TokenizerJson
from data_pipeline.text.vocabulary import Vocabulary

_NAMES = ("<pad>", "</s>")
_ROLES = Roles(pad=0, eos=1)
SMALLEST = len(_NAMES) + 256  # ids that aren't merges
_MORE_THAN_ANY = 1 << 22
_LEAST = 2  # times that a pair occurs in the sample before it is merged


class BPEConfig(TrainedConfig):
    """Byte-level BPE, as in GPT-2 and CodeT5, trained by the library `tokenizers`. Every text comes
    back to the byte."""

    model: ClassVar[type[TextModel]] = TokenizerJson

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = Field(32_000, gt=SMALLEST, le=_MORE_THAN_ANY)
    """Number of tokens to train, with 256 bytes, pad and eos; an existing tokenizer has its own number."""
    pattern: str | None = None
    """A regular expression of Oniguruma that divides text before training: no token crosses the border of a match.
    null: GPT-2's, for words, numbers and punctuation; `.+`: lines, so tokens may have all kinds of characters. An
    existing tokenizer has its own."""

    @field_validator("pattern")
    @classmethod
    def _pattern_is_read(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                Regex(pattern)
            except Exception as error:  # the library raises no class of its own
                raise ValueError(f"not a regular expression of Oniguruma: {error}") from None
        return pattern

    @property
    def memory(self) -> int:
        return 23 if self.pattern is None else 80  # measured: 12 for 2 MB of English; 76 for lines that all differ

    @property
    def pieces(self) -> int:
        return self.vocab_size if self.path is None else self.existing().size

    def existing(self) -> TokenizerJson:
        assert self.path is not None
        return tokenizer_json.existing(Path(self.path), self.sentinels)

    def train(self, sample: Sequence[bytes]) -> TokenizerJson:
        backend = _trained(sample, self.vocab_size, self.pattern)
        if (found := backend.get_vocab_size()) < self.vocab_size:
            way_out = "ask for fewer, or add text"
            raise UserError(
                f"tokenizer.vocab_size: the sample gives at most {found:,} tokens, not {self.vocab_size:,}; {way_out}"
            )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{f"{role}_token": name for role, name in zip(("pad", "eos"), _NAMES, strict=True)},
        }
        return TokenizerJson(tokenizer_json.normal(backend, _ROLES, "the trained tokenizer"), config, _ROLES, "")

    def expected(self) -> Vocabulary:
        """As many tokens, each of which may start a word or end a sentence."""
        if self.path is not None:
            return self.existing().vocabulary
        size, some = self.vocab_size, np.ones(self.vocab_size, dtype=bool)
        return Vocabulary(size, (len(_NAMES), size), *(0, 1, None), word_starts=some, sentence_ends=some)


def largest_vocabulary(sample: Sequence[bytes], pattern: str | None = None) -> int:
    """The largest vocabulary that can be trained on `sample`, which `pattern` divides."""
    return int(_trained(sample, _MORE_THAN_ANY, pattern).get_vocab_size())


def _trained(sample: Sequence[bytes], vocab_size: int, pattern: str | None) -> tokenizers.Tokenizer:
    """At most `vocab_size` tokens, trained on `sample`, which `pattern` divides."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        divided = pre_tokenizers.Split(Regex(pattern), "isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([divided, in_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_LEAST,
        special_tokens=[AddedToken(name, normalized=False) for name in _NAMES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((text.decode(errors="ignore") for text in sample), trainer)
    return backend
