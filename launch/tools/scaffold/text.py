"""Inspects a user's text by its names, first bytes and a sample: finds formats, columns and the vocabulary size."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from data_pipeline.base.errors import DamagedInput, StoreError, UserError
from data_pipeline.base.formatting import counted, printable
from data_pipeline.base.json_file import read_valid_json
from data_pipeline.base.progress import set_activity
from data_pipeline.config import SourceConfig
from data_pipeline.corpus.tokenizer.normalization import RUN, changed_by_t5, describe
from data_pipeline.corpus.tokenizer.sentencepiece_training import SentencePieceConfig, largest_vocabulary
from data_pipeline.sources import csv, jsonl, plain_text, tables
from data_pipeline.sources.formats import READERS, advice, look_of
from data_pipeline.sources.record import Input, ReadStats, Record, numbered_lines, open_text, parsed_lines
from data_pipeline.stages.documents import text_of
from data_pipeline.stages.inputs import InputFile, NoSuchFile, is_folder, list_files, list_inputs

SampleBy = Literal["document", "paragraph", "line"]
_TEXTS = (  # endings of names: prose, pages, programs, molecules
    *("txt", "text", "md", "markdown", "rst", "adoc", "org", "tex", "html", "htm", "py", "pyi", "js", "ts", "jsx"),
    *("tsx", "c", "h", "cc", "cpp", "hpp", "cs", "java", "kt", "scala", "go", "rs", "rb", "php", "pl", "lua", "r"),
    *("jl", "swift", "sh", "sql", "hs", "ml", "lisp", "el", "f90", "m", "v", "smi", "smiles"),
)
_FORMATS = {  # by the ending of a name, without the compression's ending
    **{f".{name}": "text" for name in _TEXTS},
    **{f".{name}": name for name in ("jsonl", "csv", "parquet", "arrow", "wet", "warc")},
    **{".json": "jsonl", ".ndjson": "jsonl", ".tsv": "csv", ".xml": "wikipedia"},
    **dict.fromkeys((".fasta", ".fa", ".faa", ".fna"), "fasta"),
}
_COMPRESSED = (".gz", ".bz2", ".zst")
_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")
_METADATA = ("README", "LICENSE", "_SUCCESS", *_OF_DATASETS)  # beginnings of names that aren't text
PART = "max_document_bytes"  # the option that cuts files into parts
_MOST_DAMAGED = 0.1  # of a source's records; with more, the format or encoding is another one
_SHOWN, _SHOWN_CHARACTERS = 3, 70  # texts, and characters of each
_LONGEST_NAME = 100  # of a column
_ENCODING = "{encoding: "  # in readers' messages
_HELD_OUT = ("validation", "valid", "dev")  # names of splits in datasets
_SAMPLE, _SAMPLE_FILES, _REMOTE_FILES = 300_000, 200, 8  # bytes, local files, remote files (4 MB are read of each)
_PACKED, _TEXT_PER_BYTE = (*_COMPRESSED, ".parquet"), 3  # bytes of text per byte of a compressed file
_ENOUGH, _ENOUGH_BYTES = 30, 580_000  # documents to hold out, or bytes: the 256 rows of 568 tokens of an evaluation
_SHORTEST = 300  # bytes of a document; of shorter ones more are held out, so that they fill four of T5's rows
_FEWEST, _FEWEST_BYTES = 20, 8_600  # 30 % of them can be held out, and two of T5's rows are left to train on
_ENOUGH_FILES, _PARTS = 20, 1000  # fewer files are cut into parts, of which the last ones are held out
_SMALLEST_PART, _LARGEST_PART = 256, 8 << 20
_LINES, _LONGEST_LINE = 1000, 200  # fewest lines of a file of lines, and their longest mean, in bytes
_LINES_SAMPLED, _FILES_OF_LINES = 2000, 8
_EXCEPTIONS = 0.02  # of the lines: blank ones, and those with white space before or within
_INDENTED, _CHANGED = 0.25, 0.01  # of the lines, and of the characters: worth a line
_CERTAIN = 0.9  # of the tokens that the sample gives, since held-out text isn't trained on


@dataclass(frozen=True)
class Sample:
    """A sample of the texts, about 300 kB.

    Attributes:
        bytes: estimated bytes of text in all files.
        documents: estimated number of documents in all files.
        damaged: a line for each source with damaged records.
    """

    texts: list[bytes]
    bytes: int
    documents: int
    damaged: list[str] = field(default_factory=list)

    def shown(self) -> list[str]:
        """Lines with the beginnings of the first texts, and with the damage."""
        texts = [text.decode(errors="ignore") for text in self.texts[:_SHOWN]]  # a sampled text may end in a character
        cut = [f"{text[:_SHOWN_CHARACTERS]}…" if len(text) > _SHOWN_CHARACTERS else text for text in texts]
        return [f"text {number}: {printable(text)}" for number, text in enumerate(cut, 1)] + self.damaged

    def lost_in_t5(self) -> str:
        """A line about what T5's normalization loses of the texts and how to keep it; "" if that is little.

        Much is the indentation of programs, or the characters of texts with many full-width or styled ones. Every long
        text has line breaks, which T5's own texts lost as well.
        """
        texts = [text.decode(errors="ignore") for text in self.texts]
        lines = [line for text in texts for line in text.split("\n") if line.strip()]
        changed = changed_by_t5(texts)
        others = sum(number for one, number in changed.items() if one not in ("\n", RUN))
        if sum(line[0].isspace() for line in lines) > _INDENTED * len(lines):
            return f"line breaks and indentation are lost: {describe(changed)}"
        return describe(changed) if others > _CHANGED * sum(map(len, texts)) else ""

    def held_out(self) -> float:
        """The share to hold out: 1 %, more if there are few documents. Raises UserError for too little text."""
        if self.bytes < _FEWEST_BYTES or self.documents < _FEWEST:
            found = f"{counted(self.documents, 'document')}, {self.bytes / 1000:.1f} kB"
            least = f"expected {_FEWEST} or more, of which some are held out, and {_FEWEST_BYTES / 1000:.1f} kB"
            raise UserError(f"--text: holds {found}; {least}; a file of plain text may be one document: it is cut")
        enough = max(_ENOUGH / self.documents, _ENOUGH * _SHORTEST / self.bytes)
        share = min(enough, _ENOUGH_BYTES / self.bytes)
        return round(min(0.3, max(0.01, share)), 2)

    def vocabulary(self, largest: int) -> int:
        """The vocabulary size, at most `largest`: the characters, and half of the further tokens that the text gives.

        sentencepiece tells how many tokens the sample gives. The number for the whole text grows by a power of its
        size. The power is estimated from the sample and its half, and is at most 0.5 (measured in prose: 0.6 to 0.8).
        """
        config = SentencePieceConfig()
        possible = largest_vocabulary(config, self.texts)
        one, *others = self.texts
        half = largest_vocabulary(config, self.texts[::2] if others else [one[: (len(one) + 1) // 2]])
        growth = max(1.0, self.bytes / sum(map(len, self.texts)))
        possible = int(possible * growth ** min(0.5, max(0.0, 0.8 * math.log2(possible / half))))
        known = set[str]().union(*(text.decode(errors="ignore") for text in self.texts))
        characters = len(known) + 256 * config.byte_fallback + 3
        size = max(int(1.2 * characters), min(largest, (characters + possible) // 2))
        return min(size, max(characters, int(_CERTAIN * possible)))


def sources_of(text: str, text_format: str | None) -> tuple[list[SourceConfig], list[str]]:
    """The sources of the files at `text`, a path, glob or URL, and lines about files that are left out.

    The format is `text_format`, else it is detected from a file's name, else from its first bytes. Raises UserError for
    files that no reader can read, with the way out.
    """
    try:
        inputs = list_inputs(SourceConfig(format="text", path=text))
    except (NoSuchFile, StoreError) as error:  # if the text comes later, its name tells the format
        if named := text_format or _named(_ending(text)):
            return [SourceConfig(format=named, path=text)], []
        if isinstance(error, StoreError):
            raise
        reason = "no such file or folder; for text that comes later, give --format"
        raise UserError(f"--text: {text}: {reason}") from None
    except UserError as error:
        raise UserError(f"--text: {error}") from None
    files = inputs.files
    left_out = [f"left out: {inputs.left_out}"] if inputs.hidden else []
    set_activity(f"reading {counted(len(files), 'file')}")
    folder = is_folder(text)
    if Path(text).is_dir() and (splits := _saved_splits(Path(text))):
        return splits
    if text_format:
        return [_with_column(SourceConfig(format=text_format, path=text), files[0])], left_out
    by_ending: dict[str, list[InputFile]] = defaultdict(list)
    for file in files:
        is_about_the_data = PurePosixPath(file.name).name.startswith(_METADATA)
        if not (folder and is_about_the_data):
            by_ending[_ending(file.name)].append(file)
    found: dict[str, list[str]] = defaultdict(list)  # the endings of each format
    refused: list[tuple[int, UserError]] = []
    for ending, some in sorted(by_ending.items()):
        try:
            found[_format_of(some[0], ending)].append(ending)
        except UserError as error:
            refused.append((len(some), error))
    if not found:
        raise UserError(f"--text: {refused[0][1] if refused else f'{text}: holds no text'}")
    if not folder and (refused or len(found) > 1):
        raise UserError(f"--text: {text}: matches files of several formats; give a narrower glob, or a folder")
    sources = []
    for kind, endings in sorted(found.items()):
        globs = [f"{text.rstrip('/')}/**/{_glob(by_ending[ending], ending)}" for ending in endings]
        source = SourceConfig(format=kind, path=globs if folder else text)
        sources.append(_with_column(source, by_ending[endings[0]][0]))
    return sources, left_out + [f"left out: {counted(number, 'file')}: {error}" for number, error in refused]


def cut(sources: Sequence[SourceConfig], sample_by: SampleBy | None) -> tuple[list[SourceConfig], list[str]]:
    """`sources` with options for plain text, and lines about the files.

    `sample_by`: what becomes a document of plain text. None: a line if lines are short and many, else a file. Few files
    are cut into parts, so that the last parts can be held out. Raises UserError if `sample_by` has no effect.
    """
    found, lines = list[SourceConfig](), list[str]()
    if sample_by and not any(source.format == "text" for source in sources):
        formats = " and ".join(sorted({source.format for source in sources}))
        raise UserError(f"--sample-by: for plain text, and the format is {formats}, which has documents of its own")
    for source in sources:
        files, what = _files_of(source), source.format
        size = sum(file.bytes for file in files)
        if "text" in source.options:
            what += f" in {source.options['text']!r}"
        elif source.format == "text":
            by = sample_by or ("line" if _are_lines(files) else "document")
            options: dict[str, Any] = {"sample_by": by}
            if by == "document" and 0 < len(files) < _ENOUGH_FILES:
                options[PART] = min(_LARGEST_PART, max(_SMALLEST_PART, size // _PARTS))
            if by != "document":
                what += f", a {by} a document" + ("" if sample_by else ". Other: --sample-by document")
            source = source.model_copy(update={"options": options})
        found.append(source)
        if files:
            lines.append(f"text: {counted(len(files), 'file')}, {size / 1e6:,.1f} MB, format {what}")
    return found, lines


def _are_lines(files: Sequence[InputFile]) -> bool:
    """Whether lines are texts of their own, such as sentences or molecules: short, many, and not those of wrapped
    paragraphs or programs, which have blank lines, or indents, or mostly the greatest length."""
    lines, some = list[bytes](), files[:: max(1, -(-len(files) // _FILES_OF_LINES))]
    try:
        for file in some:
            with open_text(Input(file.path, is_sample=True), plain_text.Options()) as stream:
                numbered = numbered_lines(stream, _LONGEST_LINE * _LINES)
                lines += [line or b"" for _, line in itertools.islice(numbered, _LINES_SAMPLED // len(some))]
    except UserError:  # reported when a sample is read
        return False
    size = sum(len(line) + 1 for line in lines)
    estimated = sum(file.bytes for file in files) * len(lines) / size if lines else 0
    if estimated < _LINES or size > _LONGEST_LINE * len(lines):
        return False
    few = _EXCEPTIONS * len(lines)
    if sum(not line.strip() or line[:1].isspace() for line in lines) > few:
        return False
    if sum(len(line.split(None, 1)) > 1 for line in lines) <= few:  # no spaces: molecules, words, sequences
        return True
    lengths = sorted(map(len, lines))
    full = 0.8 * lengths[int(0.99 * len(lengths))]
    return sum(length >= full for length in lengths) < len(lengths) / 4


def sample_of(sources: Sequence[SourceConfig]) -> Sample | None:
    """A sample of all sources for training, from files spread over each source; None if there are no files yet.

    Raises UserError, with the reader's message, if nothing of a source can be read, or too little.
    """
    texts: dict[bytes, None] = {}
    documents = read = whole = 0
    complete, lines = True, list[str]()
    for source in (one for one in sources if one.split != "validation"):
        files, before, damage = _files_of(source), documents, _Damage(source)
        whole += sum(file.bytes * (_TEXT_PER_BYTE if file.name.endswith(_PACKED) else 1) for file in files)
        most = _SAMPLE_FILES if all(file.path.startswith("file://") for file in files) else _REMOTE_FILES
        some = files[:: max(1, -(-len(files) // most))]
        complete &= len(some) == len(files)
        for file in some:
            budget, taken = max(1, _SAMPLE // len(some) // len(sources)), 0
            for text in _texts(file, damage):
                texts.setdefault(text[:budget])
                documents += 1
                taken += len(text)
                if taken >= budget:
                    complete = False
                    break
            read += taken
        if files:
            lines += damage.said(documents - before)
    if not texts:
        return None
    size = read if complete else max(read, whole)
    return Sample(list(texts), size, documents * size // read, lines)


def _files_of(source: SourceConfig) -> list[InputFile]:
    """The files of a source; none if they don't exist yet."""
    try:
        return list_files(source)
    except (NoSuchFile, StoreError):
        return []


class _Damage:
    """The damage of a source that readers have reported: number of records, and the first message."""

    def __init__(self, source: SourceConfig):
        self.source, self.records, self.first, self._advice = source, 0, "", ""

    def add(self, file: InputFile, records: int, position: str, reason: str) -> None:
        self.records += records
        if not self.first:
            self.first = _said(file, position, reason)
            is_known = _ENCODING in reason or not position
            self._advice = "" if is_known else advice(file.path, self.source.format, reason)

    def said(self, texts: int) -> list[str]:
        """A line about the damage beside so many `texts`. Raises UserError if there is no text, or much damage."""
        if not texts:
            raise UserError(f"--text: {self.first + self._advice or 'holds no text'}")
        if self.records > _MOST_DAMAGED * (texts + self.records):
            raise UserError(f"--text: {counted(self.records, 'record')} can't be read, and {texts:,} can: {self.first}")
        return [f"damaged: {counted(self.records, 'record')} beside {texts:,}: {self.first}"] if self.first else []


def _said(file: InputFile, position: str, reason: str) -> str:
    """A line about damage. An option that helps belongs into a corpus file, which `launch init` hasn't written."""
    way_out = " in a corpus file, or convert the files to UTF-8" if _ENCODING in reason else ""
    return f"{file.name}: {position}: {reason}{way_out}" if position else reason


def _texts(file: InputFile, damage: _Damage) -> Iterator[bytes]:
    """The texts of a file, up to damage that ends it."""
    source, stats = damage.source, ReadStats()
    try:
        given = Input(file.path, options=source.options, is_sample=True)
        for record in READERS[source.format](given, stats):
            text = text_of(record, source.format)
            if text.strip():
                yield text.encode()
    except DamagedInput as error:
        damage.add(file, 1, error.position, error.reason)
    except UserError as error:
        damage.add(file, 1, "", str(error).removeprefix("file://"))
    finally:
        if stats.damage:
            damage.add(file, stats.counters.dropped_documents["damaged"], *stats.damage[0])


def _ending(name: str) -> str:
    """The ending of a name: "a/b.json.gz" -> ".json.gz"; "" if it has none."""
    endings = PurePosixPath(name).suffixes
    return "".join(endings[-2:] if endings and endings[-1] in _COMPRESSED else endings[-1:])


def _named(ending: str) -> str | None:
    """The format of names with this ending, if known."""
    return _FORMATS.get(PurePosixPath(ending.lower()).stem)


def _format_of(file: InputFile, ending: str) -> str:
    """The format of a file by its name and first bytes. Raises UserError if no reader can read the file."""
    named, look = _named(ending), look_of(file.path)
    if look and (look.certain or not ending) and (named == "text" or named not in look.formats):
        if look.certain and (not look.formats or (named not in (None, "text") and look.formats == ("text",))):
            raise UserError(f"{file.name}: {look}")
        named = look.formats[0] if look.formats else None
    elif named == "wikipedia" and not (look and named in look.formats):
        named = None  # any other XML
    if named is None:
        raise UserError(f"{file.name}: no reader is known for it; convert it to .txt or .jsonl, or give --format")
    return "text" if named == "pairs" else named


def _glob(files: Sequence[InputFile], ending: str) -> str:
    """A pattern for names with this ending. A folder of the library datasets may also have its cached tables."""
    of_datasets = ending == ".arrow" and any(PurePosixPath(file.name).name.startswith("data-") for file in files)
    return "data-*.arrow" if of_datasets else f"*{ending}"


def _saved_splits(folder: Path) -> tuple[list[SourceConfig], list[str]] | None:
    """The splits of a DatasetDict that `save_to_disk` has written; None for any other folder."""
    names = (read_valid_json(folder / "dataset_dict.json", dict[str, list[str]]) or {}).get("splits", [])
    held_out = next((name for name in _HELD_OUT if name in names), None)
    sources, left_out = [], []
    for name in names:
        if name not in ("train", held_out):
            which = "which a model is tested on; add it as a source to train on it"
            left_out.append(f"left out: the split {name!r}, {which}")
            continue
        split = "validation" if name == held_out else "train" if held_out else None
        source = SourceConfig(format="arrow", name=name, path=f"{folder}/{name}/*.arrow", split=split)
        sources.append(_with_column(source, list_files(source)[0]))
    return (sources, left_out) if sources else None


def _with_column(source: SourceConfig, file: InputFile) -> SourceConfig:
    """`source`; if it is a table without a column "text", with the column of the longest strings as its text."""
    try:
        options, names = _columns(source, file)
    except DamagedInput as error:
        raise UserError(f"--text: {_said(file, error.position, error.reason)}") from None
    if names and "text" not in names:
        damage = _Damage(source)
        of_columns = {name: source.model_copy(update={"options": {**options, "text": name}}) for name in names}
        lengths = {name: _length(one, file, damage) for name, one in of_columns.items()}
        best = max(lengths, key=lambda name: lengths[name])
        if not lengths[best]:
            reason = damage.first or f"{file.name}: has no column of text among {', '.join(names)}"
            raise UserError(f"--text: {reason}")
        options["text"] = best
    return source.model_copy(update={"options": options}) if options else source


def _columns(source: SourceConfig, file: InputFile) -> tuple[dict[str, Any], list[str]]:
    """The options that a table needs, and the names of its columns; none for a file that is no table.

    Raises DamagedInput if the names can't be read, UserError if there are none.
    """
    options: dict[str, Any] = {}
    if source.format == "csv":
        options = csv.guessed_options(file.path)
        names = csv.names(file.path, options)
        if "text" not in names and any(map(_is_a_value, names)):
            found = ", ".join(repr(printable(name[:_SHOWN_CHARACTERS])) for name in names[:_SHOWN])
            reason = f"expected names of columns in the first row, found {found}; add a row of names above it"
            raise UserError(f"--text: {file.name}: {reason}")
    elif source.format == "jsonl":
        with open_text(Input(file.path), jsonl.Options()) as stream:
            objects = parsed_lines(stream, ReadStats(), jsonl.Options(), jsonl.json_object)
            some = [one for _, one in itertools.islice(objects, 100)]
        if len(some) == 1 and (other := jsonl.not_a_record(some[0])):
            raise UserError(f"--text: {file.name}: {other}")
        names = [*dict.fromkeys(name for one in some for name, _ in jsonl.lengths_of_strings(one))]
    else:
        names = tables.names(file.path) if source.format in ("parquet", "arrow") else []
    return options, names


def _is_a_value(name: str) -> bool:
    """Whether a field of the first row is a number or a text, not the name of a column."""
    return len(name) > _LONGEST_NAME or "\n" in name or name.replace(".", "", 1).isdigit()


def _length(source: SourceConfig, file: InputFile, damage: _Damage) -> float:
    """The mean length of the first strings in the text's column; 0 if there are none."""
    stats, records = ReadStats(), list[Record]()
    try:
        given = Input(file.path, options=source.options, is_sample=True)
        records += itertools.islice(READERS[source.format](given, stats), 100)
    except UserError:
        return 0.0
    if stats.damage:
        damage.add(file, 1, *stats.damage[0])
    return sum(len(record.text) for record in records) / max(1, len(records))
