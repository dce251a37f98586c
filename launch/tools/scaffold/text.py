"""What a user's text is, by its names, first bytes and a sample: formats, columns, the size of a vocabulary."""

import csv
import itertools
import json
import math
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from data_pipeline.config import SourceConfig, SplitConfig, TokenizerConfig
from data_pipeline.execution.inputs import InputFile, list_files
from data_pipeline.foundation.errors import DamagedInput, StoreError, UserError
from data_pipeline.foundation.formatting import counted
from data_pipeline.sources import jsonl, tables
from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.formats import READERS, look_of
from data_pipeline.sources.record import Input, ReadStats, Record
from data_pipeline.stages.documents import split_of, text_of
from data_pipeline.tokenizer.training import largest_vocabulary

FORMATS = {  # by the end of a name, without the ending of its compression
    **{f".{name}": name for name in ("jsonl", "json", "csv", "parquet", "arrow", "wet", "warc")},
    **{".txt": "text", ".md": "text", ".ndjson": "jsonl", ".tsv": "csv", ".xml": "wikipedia"},
}
_COMPRESSED = (".gz", ".bz2", ".zst")
_UNREAD = {  # what to do with files that no reader reads
    **dict.fromkeys((".xz", ".lzma", ".txz"), "decompress it with xz -d"),
    **dict.fromkeys((".lz4", ".br", ".z"), "decompress it, or compress it with gzip or zstd"),
    **dict.fromkeys((".tar", ".tgz", ".tbz2"), "unpack it with tar -xf"),
    **dict.fromkeys((".zip", ".7z", ".rar"), "unpack it"),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".epub", ".rtf"), "convert it to plain text"),
}
_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")
_METADATA = ("README", "LICENSE", "_SUCCESS", *_OF_DATASETS)  # how names begin; hidden files are no text either
_TABLES = ("csv", "json", "jsonl", "parquet", "arrow")
_DELIMITERS = ",;\t|"
_HELD_OUT = ("validation", "valid", "dev")  # names of splits in datasets
_SAMPLE, _SAMPLE_FILES, _SAMPLE_RECORDS = 300_000, 200, 2_000  # bytes, files, records of a file
_PACKED, _TEXT_PER_BYTE = (*_COMPRESSED, ".parquet"), 3  # of a compressed file
_ENOUGH, _ENOUGH_BYTES = 30, 580_000  # documents to hold out, or text: the 256 rows of 568 tokens that are evaluated
_CERTAIN = 0.9  # of the tokens that the sample gives: what is held out isn't trained on
_FEWEST_BYTES = 6_000  # to train on: two rows of T5's
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True)
class Source:
    """A source of a corpus file: files of one format, its `options`, and other `keys`."""

    format: str
    path: str | list[str]
    options: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def files(self) -> list[InputFile]:
        return list_files(SourceConfig(format=self.format, path=self.path, name=self.format))


@dataclass(frozen=True)
class Sample:
    """Texts of a corpus, at most 300 kB. `bytes`: about as much text as all files have; `documents`: how many.

    `identities` has the URL, the id and the size of each document, if the sample has all of them, or of the first of
    each text file.
    """

    texts: list[bytes]
    bytes: int
    documents: int
    identities: list[tuple[str, str, int]]

    def held_out(self, parts: int = 0) -> float:
        """The share to hold out: 1 %, or more of few documents or of `parts`, at whose end that share is held out.

        Raises UserError if no share splits the documents.
        """
        share = min(_ENOUGH / max(1, parts or self.documents), _ENOUGH_BYTES / max(1, self.bytes))
        share = 0.01 if share <= 0.01 else round(min(0.3, share), 2)
        if (parts or not self.identities) and self.bytes >= _FEWEST_BYTES:
            return share
        for one in (share, *(other for other in _SHARES if other > share)):
            ratio = SplitConfig(validation_fraction=one).ratio
            sizes = Counter[str]()
            for url, identity, size in self.identities:
                sizes[split_of(url, identity, *ratio)] += size
            if sizes["validation"] and sizes["train"] >= _FEWEST_BYTES:
                return one
        found = f"{counted(self.documents, 'document')}, {self.bytes / 1000:.1f} kB"
        raise UserError(f"--text: holds {found}; expected more, so that some are held out and the others fill rows")

    def vocabulary(self, largest: int) -> int:
        """The size of a vocabulary, at most `largest`: half of the tokens that the text gives beyond its characters.

        sentencepiece says how many tokens the sample gives. All of the text gives more, by a power of its size: the
        one by which the sample gives more than its half, or less, at most the root (measured in prose: 0.6 to 0.8).
        """
        config = TokenizerConfig()
        possible = largest_vocabulary(config, self.texts)
        one, *others = self.texts
        half = largest_vocabulary(config, self.texts[::2] if others else [one[: (len(one) + 1) // 2]])
        growth = max(1.0, self.bytes / sum(map(len, self.texts)))
        possible = int(possible * growth ** min(0.5, max(0.0, 0.8 * math.log2(possible / half))))
        known = Counter("".join(text.decode(errors="ignore") for text in self.texts))
        rarest = list(itertools.accumulate(sorted(known.values())))  # some are left out
        left_out = bisect(rarest, (1 - config.character_coverage) * known.total())
        characters = len(known) - left_out + 256 * config.byte_fallback + 3
        size = max(int(1.2 * characters), min(largest, (characters + possible) // 2))
        return min(size, max(characters, int(_CERTAIN * possible)))


def sources_of(text: str, text_format: str | None) -> tuple[list[Source], list[str]]:
    """The sources of the files at `text`, a path, a glob or a URL, and lines about what is left out.

    The format is `text_format`, else that of each file's name, else of its first bytes. Raises UserError for files that
    no reader reads, with what to do.
    """
    try:
        files = list_files(SourceConfig(format="text", path=text))
    except UserError:  # not there yet; the name must do
        kind = text_format or _by_name(text)
        if kind is None and "://" not in text:
            raise UserError(
                f"--text: {text}: no such file or folder; for text that comes later, give --format"
            ) from None
        return [Source(kind or _unknown(text), text)], []
    is_folder = Path(text).is_dir()
    if is_folder and (splits := _saved_splits(Path(text))):
        return splits
    if text_format:
        return [_with_columns(Source(text_format, text), files[0])], []
    by_ending: dict[str, list[InputFile]] = defaultdict(list)
    for file in files:
        parts = PurePosixPath(file.name).parts
        is_about_the_data = parts[-1].startswith(_METADATA) or any(part.startswith(".") for part in parts)
        if not (is_folder and is_about_the_data):
            by_ending[_ending(file.name)].append(file)
    formats: dict[str, list[str]] = defaultdict(list)  # the endings of each
    refused: dict[str, UserError] = {}
    for ending, some in sorted(by_ending.items()):
        try:
            formats[_format_of(some[0], f"{text}/{some[0].name}" if is_folder else text, ending)].append(ending)
        except UserError as error:
            refused[f"left out: {counted(len(some), 'file')}: {str(error).removeprefix('--text: ')}"] = error
    if not formats:
        raise next(iter(refused.values()), UserError(f"--text: {text}: holds no text"))
    if len(formats) == 1 and not refused and sum(map(len, by_ending.values())) == len(files):
        return [_with_columns(Source(next(iter(formats)), text), files[0])], []
    if not is_folder:
        kinds = ", ".join(sorted([*formats, *(["none"] if refused else [])]))
        raise UserError(
            f"--text: {text}: matches files of several formats ({kinds}); give a narrower glob, or a folder"
        )
    found = []
    for kind, endings in sorted(formats.items()):
        paths = [f"{text.rstrip('/')}/**/{_glob(by_ending[ending], ending)}" for ending in endings]
        source = Source(kind, paths[0] if len(paths) == 1 else paths)
        found.append(_with_columns(source, by_ending[endings[0]][0]))
    return found, [*refused]


def sample_of(sources: Sequence[Source]) -> Sample | None:
    """A sample of all sources for training, from files spread over all of them; None if no file can be read yet."""
    texts: dict[bytes, None] = {}
    seen = read = whole = 0
    complete = identified = True
    identities: list[tuple[str, str, int]] = []
    for source in (one for one in sources if one.keys.get("split") != "validation"):
        with suppress(UserError):
            files = source.files()
            whole += sum(file.bytes * (_TEXT_PER_BYTE if file.name.endswith(_PACKED) else 1) for file in files)
            some = files[:: -(-len(files) // _SAMPLE_FILES)]
            complete &= len(some) == len(files)
            budget = max(1, _SAMPLE // len(some) // len(sources))
            if source.format == "text":
                identities += [("", f"text/{file.name}/{0:09d}", file.bytes) for file in files]
            for file in some:
                records = taken = 0
                for record, text in _texts(source, file):
                    if complete and source.format != "text":
                        identities.append((record.url, f"{source.format}/{file.name}/{record.ordinal:09d}", len(text)))
                    records += 1
                    taken += len(text)
                    texts.setdefault(text[:budget])
                    if taken >= budget or records == _SAMPLE_RECORDS:
                        complete = False
                        break
                seen, read = seen + records, read + taken
            identified &= complete or source.format == "text"
    if not texts:
        return None
    size = read if complete else max(read, whole)
    return Sample(list(texts), size, seen * size // read, identities if identified else [])


def _texts(source: Source, file: InputFile) -> Iterator[tuple[Record, bytes]]:
    with suppress(DamagedInput):
        for record in READERS[source.format](Input(file.path, options=source.options), ReadStats()):
            text = text_of(record, source.format)
            if text.strip():
                yield record, text.encode()


def _ending(name: str) -> str:
    """ ".json.gz" of "a/b.json.gz", "" of a name without one."""
    endings = PurePosixPath(name.lower()).suffixes
    return "".join(endings[-2:] if endings and endings[-1] in _COMPRESSED else endings[-1:])


def _glob(files: list[InputFile], ending: str) -> str:
    """A pattern for the names with this ending; datasets keeps cached tables beside its own."""
    names = [PurePosixPath(file.name).name for file in files]
    if ending == ".arrow" and any(name.startswith("data-") for name in names):
        return "data-*.arrow"
    return f"*{PurePosixPath(names[0]).name[-len(ending) :]}" if ending else "*"


def _by_name(text: str) -> str | None:
    ending = PurePosixPath(_ending(text)).stem if _ending(text).endswith(_COMPRESSED) else _ending(text)
    if ending in _UNREAD:
        raise UserError(f"--text: {text}: no reader reads {ending}; {_UNREAD[ending]}")
    return FORMATS.get(ending)


def _unknown(text: str) -> str:
    raise UserError(f"--text: {text}: the name doesn't say what format it has; give --format")


def _format_of(file: InputFile, shown: str, ending: str) -> str:
    """The format of a file by its name and its first bytes. Raises UserError if no reader reads it."""
    named, look = _by_name(shown), look_of(file.path)
    if look and look.certain and named not in look.formats:
        if not look.formats:
            raise UserError(f"--text: {shown}: {look}")
        return look.formats[0]
    if named == "wikipedia" and not (look and named in look.formats):
        raise UserError(f"--text: {shown}: XML, but no MediaWiki export; convert it to plain text or JSON Lines")
    if named:
        return named
    if look and look.formats and not ending:
        return "text" if look.formats[0] == "pairs" else look.formats[0]
    return _unknown(shown)


def _saved_splits(folder: Path) -> tuple[list[Source], list[str]] | None:
    """The splits of a DatasetDict that `save_to_disk` wrote; None for any other folder."""
    try:
        names = json.loads((folder / "dataset_dict.json").read_text())["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    held_out = next((name for name in _HELD_OUT if name in names), None)
    found = []
    for name in (name for name in names if name in ("train", held_out)):
        split = "validation" if name == held_out else "train"
        keys = {"name": split, "split": split} if held_out else {}
        source = Source("arrow", f"{folder}/{name}/*.arrow", keys=keys)
        found.append(_with_columns(source, source.files()[0]))
    which = "which a model is tested on; add it as a source to train on it"
    left_out = [f"left out: the split {name!r}, {which}" for name in names if name not in ("train", held_out)]
    return (found, left_out) if found else None


def _with_columns(source: Source, file: InputFile) -> Source:
    """`source` with the option `text`, the column with the longest strings, unless that is "text"."""
    if source.format not in _TABLES:
        return source
    options: dict[str, Any] = {}
    if source.format == "csv":
        with open_stream(file.path) as stream:
            header = stream.readline(1 << 16).removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
        delimiter = max(_DELIMITERS, key=header.count)
        if delimiter != ",":
            options["delimiter"] = delimiter
        names = next(csv.reader([header], delimiter=delimiter), [])
    else:
        names = _names(source.format, file)
    if names and "text" not in names:
        lengths = {name: _length(source.format, file, {**options, "text": name}) for name in names}
        best = max(lengths, key=lambda name: lengths[name])
        if not lengths[best]:
            raise UserError(f"--text: {file.name}: has no column of text among {', '.join(names)}")
        options["text"] = best
    return replace(source, options=options)


def _names(kind: str, file: InputFile) -> list[str]:
    """The columns, or the keys of the first object, those of objects in it as `doc.text`."""
    if kind in ("json", "jsonl"):
        with open_stream(file.path) as stream:
            _, objects = jsonl.objects(stream, file.path, ReadStats(), jsonl.Options())
            first = next(objects, (0, {}))[1]
        keys = [key for key, value in first.items() if not isinstance(value, dict)]
        return [*dict.fromkeys([*keys, *dict(jsonl.lengths_of_strings(first))])]
    return tables.names(file.path)


def _length(kind: str, file: InputFile, options: dict[str, Any]) -> float:
    """The mean length of the strings in a column; 0 where they aren't any."""
    try:
        records = list(itertools.islice(READERS[kind](Input(file.path, options=options), ReadStats()), 100))
    except StoreError:
        raise
    except UserError:
        return 0.0
    return sum(len(record.text) for record in records) / max(1, len(records))
