"""Recognises sequences, molecules, lists of integers and programs by a sample of them, and chooses their tokens."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import first_few
from data_pipeline.config import SourceConfig
from data_pipeline.corpus.tokenizer import bpe
from data_pipeline.corpus.tokenizer.bpe import BPEConfig
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.ids import MOST_IDS, IdsConfig
from data_pipeline.corpus.tokenizer.symbols import SymbolsConfig
from data_pipeline.corpus.tokenizer.text_model import TextModel
from data_pipeline.sources import formats
from data_pipeline.sources.record import Input, ReadStats
from data_pipeline.stages.inputs import InputFile

_SMILES = re.compile(r"(?:\[[^\]\s]+]|Br|Cl|%[0-9]{2}|[BCNOPSFIbcnops0-9().=#$:/\\~@?>*+-])+")
_OF_BONDS = re.compile(r"[=#()\[1]")  # half of all molecules or more have one
_MOST_OF = 0.99  # a large file has some that are damaged
_INTEGERS = re.compile(r"\s*\d+(?:\s+\d+)+\s*", re.ASCII)
_BASES = b"ACGTUNacgtun"
_PROGRAMS = re.compile(r".*\.(c|cc|cpp|cs|go|h|hpp|hs|java|jl|js|kt|lua|ml|php|pl|py|r|rb|rs|scala|sh|swift|ts)", re.I)
_LINES = 200  # read to see what the lines of a file are
# of configs/corpora/molecules.yaml: a branch is always between two tokens
_OF_MOLECULES = BPEConfig(pattern=r"\)*[^()]+\(*|[()]+", vocab_size=768)
_SHOWN, _DIGITS_SHOWN = 30, 20  # symbols; digits of an integer
_LONGEST_ROW = 1024  # tokens; longer documents become several rows


@dataclass(frozen=True)
class Tokens:
    """The tokens of some documents.

    Attributes:
        what: the documents, in a message.
        tokenizer: the tokenizer's settings, without sentinels.
        model: the model of the sample.
        lengths: (n,) tokens of each document of the sample.
        described: the tokens, in a message.
        is_row: whether a document is a row of its own.
        recipe: the page of a recipe for such documents; None: there is none.
    """

    what: str
    tokenizer: TokenizerConfig
    model: TextModel
    lengths: np.ndarray
    described: str
    is_row: bool = True
    recipe: str | None = None

    @property
    def row(self) -> int:
        """The tokens of a row that takes all documents of the sample, a multiple of 8 and at most 1,024."""
        return int(min(_LONGEST_ROW, -(-self.lengths.max() // 8) * 8))

    def shown(self, cut_at: int) -> list[str]:
        """Lines about the documents and their lengths. `cut_at`: as in the sample."""
        half, most, nearly_all = np.percentile(self.lengths, [50, 90, 99], method="inverted_cdf")
        lengths = f"half have up to {half:,}, 90 % {most:,}, 99 % {nearly_all:,}, the longest {self.lengths.max():,}"
        of = f"of the first {cut_at:,} bytes of each" if cut_at else "of the sample"
        lines = [f"found: {self.what}; tokens: {self.described}", f"lengths in tokens, {of}: {lengths}"]
        if longer := self.is_row * int(np.count_nonzero(self.lengths > self.row)):
            lines.append(f"longer than a row: {longer:,} of {len(self.lengths):,}, which become several rows")
        if self.recipe:
            lines.append(f"a recipe for such documents, and what its model reaches: docs/results/{self.recipe}.md")
        return lines


def is_of_lines(file: InputFile) -> bool:
    """Whether each line of a text file is a molecule or a list of integers.

    Raises UserError for a .smi file that has more than molecules.
    """
    input_ = Input(file.path, options={"sample_by": "line"}, is_sample=True)
    try:
        lines = [record.text for record in itertools.islice(formats.read("text", input_, ReadStats()), _LINES)]
    except UserError:  # said when the sample is read
        return False
    if _are_integers(lines) or _are_molecules(lines):
        return True
    words = [line.split()[0] for line in lines]
    others = [line for line in lines if not _SMILES.fullmatch(line.strip())]
    if others and ".smi" in PurePosixPath(file.name).suffixes and _are_molecules(words[1:]):
        rows = "" if _SMILES.fullmatch(words[0]) else "NR > 1 "
        alone = f"keep the molecules alone: awk '{rows}{{print $1}}'"
        raise UserError(f"{file.name}: expected a molecule in each line, found {others[0]!r}; {alone}")
    return False


def tokens_of(source: SourceConfig, files: Sequence[InputFile], texts: Sequence[bytes], largest: int) -> Tokens | None:
    """The tokens for a source with these sampled `texts`; None if they are text. `largest`: the most tokens of BPE.

    Raises UserError for integers that are too large for ids.
    """
    written = [text.decode(errors="ignore") for text in texts]
    if source.has_ids or _are_integers(written):
        _refuse_large(written)
        lists = [np.array(text.split(), dtype=np.int64) for text in written]
        most = max(int(one.max()) for one in lists)
        size = 1 << max(1, most.bit_length())
        described = f"the integers; tokenizer.vocab_size {size:,} is the next power of two above {most:,}"
        config = IdsConfig(vocab_size=size)
        return Tokens("lists of integers", config, config.existing(), _lengths(lists), described, recipe="items")
    if source.format == "fasta":
        letters = b"".join(texts)
        are_bases = len(letters.translate(None, _BASES)) <= 0.01 * len(letters)
        what, recipe = ("nucleotides", None) if are_bases else ("proteins", "proteins")
        symbols = SymbolsConfig()
        model = symbols.train(texts)
        described = f"{len(model.symbols):,} symbols, the most frequent first: {first_few(model.symbols, _SHOWN)}"
        return Tokens(what, symbols, model, _lengths(model.encode(written)), described, recipe=recipe)
    if _are_molecules(written):
        return _of_bpe("SMILES", "molecules", _OF_MOLECULES, texts, written)
    if source.format == "text" and all(_PROGRAMS.fullmatch(file.name) for file in files):
        return _of_bpe("source code", "code", BPEConfig(vocab_size=largest), texts, written, is_row=False)
    return None


def half_of_the_tokens(fewest: int, most: int, largest: int, growth: float = 1.0) -> float:
    """A vocabulary size, at most `largest`: `fewest`, and half of the tokens from there to `most`, times `growth`."""
    return min(largest, fewest + (most - fewest) / 2 * growth)


def keys_of(tokenizer: TokenizerConfig) -> dict[str, Any]:
    """The keys of the corpus file's section `tokenizer`."""
    return {"kind": tokenizer.kind, **tokenizer.model_dump(include=tokenizer.model_fields_set - {"kind"})}


def _of_bpe(
    what: str, recipe: str, config: BPEConfig, texts: Sequence[bytes], written: list[str], is_row: bool = True
) -> Tokens:
    """BPE tokens: `config.vocab_size`, or half of the largest vocabulary that the sample gives, if this is smaller."""
    most = bpe.largest_vocabulary(texts, config.pattern)
    size = int(half_of_the_tokens(bpe.SMALLEST, most, config.vocab_size))
    config = config.model_copy(update={"vocab_size": size})
    model = config.train(texts)
    described = f"{size:,} of byte-level BPE; no character is changed"
    return Tokens(what, config, model, _lengths(model.encode(written)), described, is_row, recipe)


def _lengths(documents: Sequence[Any]) -> np.ndarray:
    return np.array([len(one) for one in documents])


def _refuse_large(lists: Sequence[str]) -> None:
    """Raises UserError if an integer is larger than all ids."""
    large = next((word for text in lists for word in text.split() if float(word) >= MOST_IDS), None)
    if large:
        largest = f"ids go up to {MOST_IDS - 1:,} (tokenizer.vocab_size); number the different integers from 0"
        raise UserError(f"holds lists of integers, and one of them is {large[:_DIGITS_SHOWN]}; {largest}")


def _are_integers(texts: Sequence[str]) -> bool:
    return bool(texts) and all(map(_INTEGERS.fullmatch, texts))


def _are_molecules(texts: Sequence[str]) -> bool:
    """99 % are SMILES in their characters, and half have a bond, a branch, a ring or an atom in brackets."""
    smiles = [text for text in texts if _SMILES.fullmatch(text.strip())]
    are_smiles = bool(smiles) and len(smiles) >= _MOST_OF * len(texts)
    return are_smiles and sum(_OF_BONDS.search(text) is not None for text in smiles) >= len(texts) / 2
