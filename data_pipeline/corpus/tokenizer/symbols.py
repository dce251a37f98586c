"""Symbols: each match of a regular expression is a token, such as a character, a word or an atom of a SMILES string.

The ids are pad 0, eos 1, unk 2, then the symbols. Text between matches is refused, unless it is white space. A symbol
that isn't in the vocabulary is one unknown token.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import tokenizers
from pydantic import Field, field_validator
from tokenizers import Regex, decoders, models, pre_tokenizers

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.config_file import LocalPath
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer.config import TrainedConfig
from data_pipeline.corpus.tokenizer.text_model import TextModel, ends_sentence, read_file, read_saved, starts_word
from data_pipeline.text.vocabulary import Vocabulary

PAD, EOS, UNK = 0, 1, 2
NAMES = ("<pad>", "</s>", "<unk>")
MODEL = "symbols.json"
CHARACTERS = "."
_SENTINEL = "<extra_id_"
_AROUND = 20  # characters that a message shows of a text, before and behind a place
_LETTERS = r"\p{L}\p{N}_"
_SPACES = r"\t-\r\x{1c}-\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_CLASSES = {r"\w": _LETTERS, r"\W": _LETTERS, r"\s": _SPACES, r"\S": _SPACES}


@dataclass(frozen=True)
class _Saved:
    pattern: str
    symbols: list[str]


class Symbols(TextModel):
    """`symbols`, in the order of their ids, are matches of `pattern`, in which a dot matches a line break, too.

    Decoded symbols follow each other without a space, unless the pattern would read two of them as one, as with words.
    """

    kind = "symbols"
    file_names = (MODEL,)

    def __init__(self, pattern: str, symbols: Sequence[str]):
        self.pattern, self.symbols = pattern, [*symbols]
        self._matches = re.compile(pattern, re.DOTALL)
        self._ids = {symbol: id_ for id_, symbol in enumerate(symbols, len(NAMES))}
        joined = any(self._matches.fullmatch(symbol * 2) for symbol in symbols)
        self.gap = " " if joined and not self._matches.fullmatch(" ") else ""

    @classmethod
    def read(cls, directory: Path) -> "Symbols":
        return cls(**asdict(read_saved(directory / MODEL, _Saved)))

    def glue(self, first: int) -> str:
        return self.gap

    @property
    def size(self) -> int:
        return len(NAMES) + len(self.symbols)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """A symbol that begins with white space starts a word; if symbols are words, each one does."""
        texts = [*("" for _ in NAMES), *(self.gap + symbol for symbol in self.symbols)]
        return Vocabulary(
            size=self.size,
            text=(len(NAMES), self.size),
            pad=PAD,
            eos=EOS,
            unk=UNK,
            word_starts=np.array([*map(starts_word, texts)]),
            sentence_ends=np.array([*map(ends_sentence, texts)]),
            texts=tuple(texts),
        )

    @property
    def ids(self) -> dict[str, int]:
        """The id of each token, pad, eos and unk included."""
        return {**dict(zip(NAMES, range(len(NAMES)), strict=True)), **self._ids}

    @property
    def names(self) -> Mapping[int, str]:
        return dict(enumerate(NAMES))

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        saved = asdict(_Saved(self.pattern, self.symbols))
        return {MODEL: (json.dumps(saved, ensure_ascii=False, indent=0) + "\n").encode()}

    @cached_property
    def sha256(self) -> str:
        return fingerprint([self.pattern, self.symbols])

    def has(self, token: str) -> bool:
        return token in NAMES or token in self._ids

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Raises UserError, which names the first place, if there is text between matches other than white space."""
        if self.pattern == CHARACTERS:
            return [ids.tolist() for ids in self.encode_to_arrays(texts)]
        return [[self._ids.get(symbol, UNK) for symbol in matches(self._matches, text)] for text in texts]

    def encode_to_arrays(self, texts: list[str]) -> list[np.ndarray]:
        if self.pattern != CHARACTERS:
            return super().encode_to_arrays(texts)
        found = []
        for text in texts:
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
            found.append(self._ids_of_codes[np.minimum(codes, len(self._ids_of_codes) - 1)])
        return found

    @cached_property
    def _ids_of_codes(self) -> np.ndarray:
        """The id of each code point; the last one stands for all above."""
        codes = [ord(symbol) for symbol in self.symbols]
        ids = np.full(max(codes, default=0) + 2, UNK, dtype=np.int32)
        ids[codes] = np.arange(len(NAMES), self.size)
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.gap.join(self.symbols[id_ - len(NAMES)] for id_ in ids)

    def without_token(self, texts: Iterable[str]) -> dict[str, int]:
        """The number of each symbol of `texts` that is unknown."""
        seen = Counter(symbol for text in texts for symbol in matches(self._matches, text))
        return {symbol: count for symbol, count in seen.items() if symbol not in self._ids}

    def backend(self) -> tokenizers.Tokenizer:
        """WordLevel behind a Split. Raises UserError if the library doesn't read the pattern as Python does."""
        backend = tokenizers.Tokenizer(models.WordLevel(self.ids, unk_token=NAMES[UNK]))
        try:
            pattern = Regex(in_oniguruma(self.pattern))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"tokenizer.pattern: {self.pattern!r} has no form in a tokenizer.json: {error}") from None
        backend.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
        if not self.gap:
            backend.decoder = decoders.Fuse()
        everything = self.gap.join(self.symbols)
        if backend.encode(everything, add_special_tokens=False).ids != self.encode([everything])[0]:
            raise UserError(f"tokenizer.pattern: {self.pattern!r} means something else in a tokenizer.json than here")
        return backend


def matches(pattern: re.Pattern[str], text: str) -> list[str]:
    """The matches of `pattern`, in their order. Raises UserError if there is other text than white space between."""
    found = [match[0] for match in pattern.finditer(text)] if pattern.groups else pattern.findall(text)
    if sum(map(len, found)) < len(text):
        end = 0
        for start, stop in [*(match.span() for match in pattern.finditer(text)), (len(text), len(text))]:
            if between := text[end:start].strip():
                place = text.index(between, end)
                shown = text[max(0, place - _AROUND) : place + _AROUND]
                raise UserError(
                    f"{text[place]!r} at character {place} isn't in a match of tokenizer.pattern: {shown!r}"
                )
            end = stop
    return found


def in_oniguruma(pattern: str) -> str:
    r"""Python's `pattern` in the syntax of the library `tokenizers`, for the classes and brackets that differ.

    In Oniguruma, \w has combining marks, \s lacks U+001C to U+001F, and a bracket or && in a class has a meaning.

        \w+|[^\w\s]  ->  (?m:[\p{L}\p{N}_]+|[^\p{L}\p{N}_\t-\r …])
    """
    written, inside, first = list[str](), False, False
    for part in re.findall(r"\\.|\[\^?|.", pattern, re.DOTALL):
        opens = part in ("[", "[^") and not inside
        if opens:
            written.append(part)
        elif part in _CLASSES:
            one = _CLASSES[part]
            written.append(one if inside and not part[1].isupper() else f"[{'^' * part[1].isupper()}{one}]")
        elif inside and (part[0] in "[&" or (part == "]" and first)):
            written.append(f"\\{part}")
        else:
            written.append(part)
            inside = inside and part != "]"
        inside, first = inside or opens, opens
    return f"(?m:{''.join(written)})"  # m: a dot matches a line break


class SymbolsConfig(TrainedConfig):
    """Matches of a regular expression, such as characters, words or the atoms of SMILES. Training counts them: the
    most frequent ones come first. The ids are pad 0, eos 1, unk 2, then the symbols."""

    model: ClassVar[type[TextModel]] = Symbols
    tokens_per_byte: ClassVar[float] = 1.0
    tokens_grow: ClassVar[bool] = False

    kind: Literal["symbols"] = "symbols"
    path: LocalPath | None = None
    """A text file with a symbol on each line, in the order of their ids; or a directory such as an export's or a
    corpus's. null: the symbols of the training sample."""
    pattern: str = CHARACTERS
    r"""A regular expression of Python: each match is a token, and a dot matches line breaks, too. `.`: characters;
    `\S+`: words. Other text than white space between the matches is an error."""
    vocab_size: int | None = Field(None, gt=len(NAMES), le=1 << 22)
    """Maximum number of tokens, with pad, eos and unk: the most frequent symbols. null: all symbols of the sample."""

    @field_validator("pattern")
    @classmethod
    def _matches_something(cls, pattern: str) -> str:
        try:
            found = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if found.match(""):
            raise ValueError(f"{pattern!r} matches the empty text")
        return pattern

    @property
    def memory(self) -> int:
        return 32  # of words that are all different; a word takes 100 bytes and more

    @property
    def pieces(self) -> int:
        return self.expected().size

    @property
    def on_unknown(self) -> str:
        more = "add text to the sample (tokenizer.sample_documents, tokenizer.sample_bytes)"
        if self.path is not None:
            return f"add these symbols to {self.path}"
        return more if self.vocab_size is None else f"raise tokenizer.vocab_size ({self.vocab_size:,}), or {more}"

    def existing(self) -> Symbols:
        assert self.path is not None
        path = Path(self.path)
        if not path.is_dir():
            return Symbols(self.pattern, self._listed(path))
        model = Symbols.read(path / "tokenizer" if (path / "tokenizer" / MODEL).exists() else path)
        if "pattern" in self.model_fields_set and self.pattern != model.pattern:
            raise UserError(f"tokenizer.pattern: {self.path} has {model.pattern!r}; leave pattern out")
        return model

    def _listed(self, path: Path) -> list[str]:
        """The symbols in a file with one on each line. Raises UserError for a line that isn't a new symbol."""
        lines = read_file(path).split("\n")
        symbols = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
        first: dict[str, int] = {}
        for number, symbol in enumerate(symbols, 1):
            before = first.setdefault(symbol, number)
            if not symbol:
                raise UserError(f"{path}: line {number} is empty; expected a symbol on each line")
            if before < number:
                raise UserError(f"{path}: line {number}: {symbol!r} is on line {before}, too")
            if self._is_reserved(symbol):
                raise UserError(f"{path}: line {number}: {symbol!r} is a special token's name, which has an id already")
            if not re.fullmatch(self.pattern, symbol, re.DOTALL):
                raise UserError(f"{path}: line {number}: {symbol!r} is no match of tokenizer.pattern, {self.pattern!r}")
        if not symbols:
            raise UserError(f"{path}: lists no symbols")
        return symbols

    def _is_reserved(self, symbol: str) -> bool:
        return symbol in NAMES or symbol in self.special_tokens or symbol.startswith(_SENTINEL)

    def train(self, sample: Sequence[bytes]) -> Symbols:
        """Texts that the pattern doesn't cover count by their matches here; they are refused when they are encoded."""
        pattern, counts = re.compile(self.pattern, re.DOTALL), Counter[str]()
        for text in sample:
            counts.update(match[0] for match in pattern.finditer(text.decode(errors="ignore")))
        if sum(map(len, sample)) >= self.sample_bytes:  # the last text may be cut inside its last symbol
            last = ""
            for match in pattern.finditer(sample[-1].decode(errors="ignore")):
                last = match[0]
            counts[last] -= 1
        most = None if self.vocab_size is None else self.vocab_size - len(NAMES)
        found = [symbol for symbol, count in counts.items() if count > 0 and not self._is_reserved(symbol)]
        ordered = sorted(found, key=lambda symbol: (-counts[symbol], symbol))
        if not ordered:
            raise UserError(f"tokenizer.pattern: {self.pattern!r} matches nothing in the sample")
        return Symbols(self.pattern, ordered[:most])

    def expected(self) -> Vocabulary:
        """As many symbols as `vocab_size` allows, or some, each of which may start a word or end a sentence."""
        if self.path is not None:
            return self.existing().vocabulary
        size = self.vocab_size or 256
        some = np.ones(size, dtype=bool)
        return Vocabulary(size, (len(NAMES), size), PAD, EOS, UNK, word_starts=some, sentence_ends=some)
