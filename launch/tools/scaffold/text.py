"""Looks at a user's text: the format of its files, the column of a table, a sample, and the vocabulary size."""

import glob
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.base.formatting import counted, first_few, printable
from data_pipeline.base.progress import set_activity
from data_pipeline.config import SourceConfig
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePieceConfig, largest_vocabulary
from data_pipeline.sources import csv, formats, jsonl, tables
from data_pipeline.sources.formats import FORMATS, advice, look_of
from data_pipeline.sources.record import Input, ReadStats
from data_pipeline.stages.inputs import InputFile, is_folder, list_inputs
from launch.tools.scaffold.tokens import half_of_the_tokens, is_of_lines

SampleBy = Literal["document", "paragraph", "line"]
PART = "max_document_bytes"  # the option that cuts files of text into parts
_FORMATS = {  # by the ending of a name, without the compression's ending; others are plain text, if they are text
    **{f".{name}": name for name in ("jsonl", "csv", "parquet", "arrow", "wet", "warc", "fasta")},
    **{".json": "jsonl", ".ndjson": "jsonl", ".tsv": "csv"},
    **dict.fromkeys((".fa", ".faa", ".fna"), "fasta"),
}
_COMPRESSED = (".gz", ".bz2", ".zst")
_PACKED, _TEXT_PER_BYTE = (*_COMPRESSED, ".parquet"), 3  # bytes of text per byte of a compressed file
_ENOUGH_FILES, _PARTS = 20, 1000  # fewer files of text are cut into parts, of which the last ones are held out
_SMALLEST_PART, _LARGEST_PART = 256, 8 << 20
_SAMPLE, _SAMPLE_FILES, _REMOTE_FILES = 1_000_000, 200, 8  # bytes, local files, remote files (4 MB are read of each)
_MOST_DAMAGED = 0.1  # of the records; with more, the format or encoding is another one
_SHOWN, _SHOWN_CHARACTERS = 3, 70  # texts or names, and characters of each text
_FEWEST, _FEWEST_BYTES = 20, 8_600  # 30 % of them can be held out, and two of T5's rows are left to train on
_HELD_OUT, _HELD_OUT_BYTES, _MOST_BYTES = 30, 9_000, 580_000  # documents; bytes: four of T5's rows, and 256 of them
_CERTAIN = 0.9  # of the tokens that the sample gives: the corpus gives them, too, without what is held out


@dataclass(frozen=True)
class Sample:
    """The texts of up to 1 MB of the files, and the estimated bytes of text and number of documents in all files.

    `cut_at`: the bytes after which a long text was cut; 0: none was.
    """

    texts: list[bytes]
    bytes: int
    documents: int
    cut_at: int = 0

    def shown(self) -> list[str]:
        """Lines with the beginnings of the first texts."""
        texts = [text.decode(errors="ignore") for text in self.texts[:_SHOWN]]  # a sampled text may end in a character
        cut = [f"{text[:_SHOWN_CHARACTERS]}…" if len(text) > _SHOWN_CHARACTERS else text for text in texts]
        return [f"text {number}: {printable(text)}" for number, text in enumerate(cut, 1)]

    def held_out(self) -> float:
        """The share to hold out: 1 %, more if there are few documents. Raises UserError for too little text."""
        if self.bytes < _FEWEST_BYTES or self.documents < _FEWEST:
            found = f"{counted(self.documents, 'document')}, {self.bytes / 1000:.1f} kB"
            least = f"expected {_FEWEST} or more, of which some are held out, and {_FEWEST_BYTES / 1000:.1f} kB"
            raise UserError(f"holds {found}; {least}; a file of plain text may be one document: it is cut")
        enough = max(_HELD_OUT / self.documents, _HELD_OUT_BYTES / self.bytes)
        return round(min(0.3, max(0.01, min(enough, _MOST_BYTES / self.bytes))), 2)

    def vocabulary(self, largest: int) -> int:
        """The vocabulary size, at most `largest`: the characters, and half of the further tokens that the sample gives.
        Of a larger text, more: their number grows by the square root of its size, up to all that the sample gives."""
        config = SentencePieceConfig()
        possible = largest_vocabulary(config, self.texts)
        known = set("".join(text.decode(errors="ignore") for text in self.texts))
        characters = len(known) + 256 * config.byte_fallback + 3
        growth = max(1.0, self.bytes / sum(map(len, self.texts))) ** 0.5
        size = max(1.2 * characters, half_of_the_tokens(characters, possible, largest, growth))
        return int(min(size, max(characters, _CERTAIN * possible)))


def source_of(
    text: str, text_format: str | None, sample_by: SampleBy | None
) -> tuple[SourceConfig, list[InputFile], list[str]]:
    """The source of the files at `text`, a path, glob or URL; these files; and lines about them.

    The format is `text_format`, else it is detected from the files' names and first bytes; files of other formats in
    the same folder are left out. `sample_by`: what becomes a document of plain text. Raises UserError for files that no
    reader can read, with the way out.
    """
    inputs = list_inputs(SourceConfig(format=text_format or "text", path=text))
    set_activity(f"reading {counted(len(inputs.files), 'file')}")
    kind, files, others = _of_one_format(text, inputs.files, text_format)
    path: str | list[str] = text
    if others:
        endings = sorted({_ending(file.name) for file in files})
        if "" in endings or not is_folder(text):
            raise UserError(f"{text}: matches files of several formats; give a narrower glob, or a folder")
        path = [f"{glob.escape(text.rstrip('/'))}/**/*{glob.escape(ending)}" for ending in endings]
    source, what = SourceConfig(format=kind, path=path), kind
    size = sum(file.bytes for file in files)
    if sample_by and kind != "text":
        raise UserError(f"--sample-by: for plain text, and the format is {kind}, which has documents of its own")
    options = _table_options(source, files[0])
    if kind == "text":
        sample_by = sample_by or ("line" if is_of_lines(files[0]) else "document")
        options["sample_by"] = sample_by
        what += f", a {'file' if sample_by == 'document' else sample_by} a document; --sample-by chooses"
        if sample_by == "document" and len(files) < _ENOUGH_FILES:
            options[PART] = min(_LARGEST_PART, max(_SMALLEST_PART, size // _PARTS))
    elif kind == "fasta":
        options["upper"] = True  # a soft-masked genome has repeats in lower case
        what += ", residues in upper case"
    elif options:
        what += f", ids in {options['ids']!r}" if "ids" in options else f", text in {options.get('text', 'text')!r}"
    lines = [f"left out: {inputs.left_out}"] if inputs.hidden else []
    if others:
        names = first_few([printable(file.name) for file in others], _SHOWN)
        lines.append(f"left out: {counted(len(others), 'file')} that can't be read as {kind}: {names}")
    lines.append(f"text: {counted(len(files), 'file')}, {size / 1e6:,.1f} MB, format {what}")
    return source.model_copy(update={"options": options}), files, lines


def _of_one_format(
    text: str, files: Sequence[InputFile], text_format: str | None
) -> tuple[str, list[InputFile], list[InputFile]]:
    """The format of most bytes of the files at `text`, the files of this format, and the others.

    Raises UserError if no reader can read any file.
    """
    if any(file.name == "dataset_dict.json" for file in files):
        raise UserError(f"{text}: holds the splits of a DatasetDict; give one of its folders: {text.rstrip('/')}/train")
    formats: dict[str, str] = {}  # by the ending of names; "": of files that no reader can read
    sizes, problem = Counter[str](), f"{text}: holds no text"
    for file in files:
        if (ending := _ending(file.name)) not in formats:
            try:
                formats[ending] = text_format or _format_of(file, ending)
            except UserError as error:
                formats[ending], problem = "", str(error)
        sizes[formats[ending]] += file.bytes
    del sizes[""]
    if not sizes:
        raise UserError(problem)
    ((kind, _),) = sizes.most_common(1)
    own = [file for file in files if formats[_ending(file.name)] == kind]
    return kind, own, [file for file in files if formats[_ending(file.name)] != kind]


def _format_of(file: InputFile, ending: str) -> str:
    """The format of a file by its name and first bytes. Raises UserError if no reader can read the file."""
    named, look = _FORMATS.get(PurePosixPath(ending.lower()).stem), look_of(file.path)
    if look and not look.formats and (look.certain or named is None):
        raise UserError(f"{file.name}: {look}{'' if look.certain else '; convert it to text in UTF-8'}")
    if look and look.certain and named not in look.formats:
        if named and look.formats == ("text",):  # JSON that isn't JSON Lines
            raise UserError(f"{file.name}: {look}")
        return look.formats[0]
    return named or "text"


def _ending(name: str) -> str:
    """The ending of a name: "a/b.json.gz" -> ".json.gz"; "" if it has none."""
    endings = PurePosixPath(name).suffixes
    return "".join(endings[-2:] if endings and endings[-1] in _COMPRESSED else endings[-1:])


def _table_options(source: SourceConfig, file: InputFile) -> dict[str, Any]:
    """The options that a table needs: how a CSV file is written and, without a column "text", a column of SMILES, else
    the column of the longest strings or lists of integers. {} for a file that is no table."""
    options: dict[str, Any] = {}
    names, lists = list[str](), list[str]()
    if source.format == "csv":
        options = csv.guessed_options(file.path)
        names = csv.names(file.path, options)
    elif source.format == "jsonl":
        names, lists = jsonl.names(file.path), jsonl.names_of_ids(file.path)
    elif source.format in ("parquet", "arrow"):
        names = lists = tables.names(file.path)

    def length(column: dict[str, str]) -> float:
        """The mean length of the first strings or lists in a column; 0 if there are none."""
        input_ = Input(file.path, options={**options, **column}, is_sample=True)
        try:
            records = [*itertools.islice(formats.read(source.format, input_, ReadStats()), 100)]
        except UserError:
            return 0.0
        return sum(len(record.text) for record in records) / max(1, len(records))

    if "text" in names:
        return options
    if molecules := [name for name in names if name.lower().endswith("smiles")]:  # an InChI is longer
        names, lists = molecules, []
    columns = [*({"text": name} for name in names), *({"ids": name} for name in lists)]
    return options | max(columns, key=length) if columns else options


def sample_of(source: SourceConfig, files: Sequence[InputFile]) -> Sample:
    """A sample of a source, from files spread over it.

    Raises UserError, with the reader's message, if nothing can be read, or too little.
    """
    texts: dict[bytes, None] = {}
    documents = read = damaged = longest = 0
    first = ""
    most = _SAMPLE_FILES if all(file.path.startswith("file://") for file in files) else _REMOTE_FILES
    some = files[:: -(-len(files) // most)]
    complete, budget = len(some) == len(files), _SAMPLE // len(some)
    for file in some:
        stats, taken = ReadStats(), 0
        try:
            for record in formats.read(source.format, Input(file.path, options=source.options, is_sample=True), stats):
                text = FORMATS[source.format].text_of(record).encode()
                if not text.strip():
                    continue
                texts.setdefault(text[:budget])
                documents += 1
                taken += len(text)
                longest = max(longest, len(text))
                if taken >= budget:
                    complete = False
                    break
        except DamagedInput as error:
            stats.damaged(error.position, error.reason)
        read += taken
        damaged += stats.counters.dropped_documents["damaged"]
        if stats.damage:
            first = first or ": ".join([file.name, *stats.damage[0]])
    if not texts:
        raise UserError(f"{first}{advice(some[0].path, source.format, first)}" if first else "holds no text")
    if damaged > _MOST_DAMAGED * (documents + damaged):
        raise UserError(f"{counted(damaged, 'record')} can't be read, and {documents:,} can: {first}")
    whole = sum(file.bytes * (_TEXT_PER_BYTE if file.name.endswith(_PACKED) else 1) for file in files)
    size = read if complete else max(read, whole)
    return Sample(list(texts), size, documents * size // read, budget if longest > budget else 0)
