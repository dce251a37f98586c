"""Lists the files of a source, and divides them into the pieces that units read."""

import glob
import hashlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from data_pipeline.base import hub, stores
from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.base.formatting import counted, first_few, printable
from data_pipeline.base.paths import opening
from data_pipeline.base.store import Store
from data_pipeline.base.threads import in_threads
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.sources.record import Range
from data_pipeline.sources.wikipedia_export import index_of, ranges
from data_pipeline.stages.parts import neighbours
from data_pipeline.stages.revisions import pinned
from data_pipeline.stages.stage import KINDS

_OPENING = 4096  # the size that a file counts as at least: opening it takes as long as reading so many bytes
_CORPORA_SHOWN = 3
_STAMPS = ("mtime", "ETag", "blob_id", "LastModified")  # keys of listings
_SAMPLED = 1 << 14  # bytes of each sample of a local file
WRITTEN = {  # the files and folders of a corpus's directory
    *(kind.folder.split("/")[0] for kind in KINDS if kind.folder),
    *("manifest.json", "blocks.parquet", "lineage.parquet", "report.json", "report.md"),
}


class NoSuchFile(UserError):
    """No file has the path, or matches the glob."""


@dataclass(frozen=True)
class InputFile:
    """A file of a source.

    Attributes:
        name: the path relative to the source's root.
        stamp: changes when the file changes: a store's ETag, the Hub's blob id, or a local file's time of change and a
            checksum of its head, middle and tail.
        sha256: the checksum that the store publishes; "" if none.
    """

    source: SourceConfig
    path: str
    name: str
    bytes: int
    stamp: str
    sha256: str = ""


def is_folder(location: str) -> bool:
    """Whether there is a folder at a path or URL. Raises StoreError if the store refuses, or doesn't answer."""
    filesystem, path = stores.filesystem(location)

    def ask() -> bool:
        if hub.parse(location) is None:
            return bool(filesystem.isdir(path))
        try:  # the Hub's isdir returns False if the Hub doesn't answer
            return bool(filesystem.info(path)["type"] == "directory")
        except FileNotFoundError:
            return False

    return stores.with_retries(ask, location, stores.LISTING_SECONDS)


def files_of(config: CorpusConfig) -> list[InputFile]:
    """The files of all sources, in the order of their documents' ids. Raises what `list_files` raises."""
    return [file for source in config.sources for file in list_files(source, output=config.output)]


def list_files(source: SourceConfig, kind: str = "source", output: str | None = None) -> list[InputFile]:
    """The files that match a source's path, in the order of their documents' ids. A directory means all files below it.

    `kind`: what messages call the source. `output`: the path or URL of the corpus to build. Files that a build has
    written there, and corpora below the source, are left out, which a line on stderr says. The paths of files of the
    Hugging Face Hub have the branch's current commit.

    Raises NoSuchFile if a path or glob matches no file, and UserError for files that can't be read: a broken link, a
    directory that links to one above it or can't be listed, a name that isn't UTF-8.
    """
    found: dict[str, InputFile] = {}
    for pattern in [source.path] if isinstance(source.path, str) else source.path:
        with opening(pattern):
            files = [*_matching(pattern, source, kind, output)]
        for file in files:
            if file.name in found:
                other = f"{kind} {source.name!r} already has a file {file.name!r}"
                raise UserError(f"{file.path.removeprefix('file://')}: {other}; put this one in a separate {kind}")
            found[file.name] = file
    return [found[name] for name in sorted(found, key=lambda name: f"{name}/")]


def _matching(pattern: str, source: SourceConfig, kind: str, output: str | None) -> Iterator[InputFile]:
    """The files that match one path or glob of a source."""
    at_commit = pinned(pattern)
    filesystem, path = stores.filesystem(at_commit)
    local = stores.is_local(filesystem)
    if local:
        _refuse_closed_way(path)
    root = path if is_folder(at_commit) else _root(path, local)
    if local:
        files = {file: filesystem.info(file) for file in _local_files(path, root)}
    else:
        found_there = partial(_remote_files, filesystem, path, root)
        files = stores.with_retries(found_there, pattern, stores.LISTING_SECONDS)
    if built := _of_corpora(files, path, root, output, local):
        shown = first_few(sorted(set(built.values())), _CORPORA_SHOWN)
        reason = f"{counted(len(built), 'file')} of corpora that were built there ({shown})"
        if len(built) == len(files):
            raise UserError(f"{pattern}: has nothing but {reason} (path of {kind} {source.name!r})")
        print(f"{pattern}: left out {reason}", file=sys.stderr)
        files = {file: info for file, info in files.items() if file not in built}
    if not files:
        stores.check_bucket(pattern)
        raise NoSuchFile(f"{pattern}: no such file (path of {kind} {source.name!r})")
    sizes = [(file, info["size"]) for file, info in sorted(files.items())]
    samples = in_threads(_samples_checksum, sizes) if local else [""] * len(files)
    for (file, _), sample in zip(sizes, samples, strict=True):
        info = files[file]
        name = str(PurePosixPath(file).relative_to(root))
        stamp = next(filter(None, map(info.get, _STAMPS)), "")
        url, size, sha256 = filesystem.unstrip_protocol(file), info["size"] or 0, hub.sha256_of(info)
        yield InputFile(source, url, name, size, f"{stamp}{sample}", sha256)


def _of_corpora(files: Collection[str], path: str, root: str, output: str | None, local: bool) -> dict[str, str]:
    """The `files` below `root` that a build has written, with the directories of their corpora.

    A folder is a corpus if it has `.stages`, or manifest.json and blocks.parquet. If the user's `path` itself contains
    `documents`, the documents of finished corpora are read.
    """
    own, place = "", (output or "").removeprefix("file://")
    if place and ("://" in place) != local:
        own = str(Path(place).resolve()) if local else stores.filesystem(place)[1].rstrip("/")
    means_documents = "documents" in PurePosixPath(path).parts

    def exists(name: str) -> bool:
        return Path(name).exists() if local else name in files

    @cache
    def corpus(directory: str) -> str:
        if len(directory) <= len(root):
            return ""
        if above := corpus(str(PurePosixPath(directory).parent)):
            return above
        if own == (str(Path(directory).resolve()) if local else directory):
            return directory
        if means_documents:
            return ""
        finished = exists(f"{directory}/manifest.json") and exists(f"{directory}/blocks.parquet")
        return directory if finished or exists(f"{directory}/.stages") else ""

    built = {file: found for file in files if (found := corpus(str(PurePosixPath(file).parent)))}
    if local and (own == str(Path(root).resolve()) or (Path(root, ".stages").exists() and not means_documents)):
        written = {file for file in files if PurePosixPath(file).relative_to(root).parts[0] in WRITTEN}
        built |= dict.fromkeys(written, root)
    return built


def _samples_checksum(sized: tuple[str, int]) -> str:
    """A checksum of the head, middle and tail of a local file, (path, size), which cover a small file."""
    (path, size), digest = sized, hashlib.blake2b(digest_size=16)
    try:
        with Path(path).open("rb", buffering=0) as file:
            for start in sorted({0, max(0, (size - _SAMPLED) // 2), max(0, size - _SAMPLED)}):
                digest.update(os.pread(file.fileno(), _SAMPLED, start))
    except OSError:
        return ""  # reported when the file is read
    return digest.hexdigest()


def _remote_files(filesystem: fsspec.AbstractFileSystem, path: str, root: str) -> dict[str, dict[str, Any]]:
    """The files that match `path`, which may be a glob, and all files below directories that match; with the listing's
    information.

    A request for each of 50,000 files would take an hour. Only web servers, whose listings have no sizes, get one for
    each file.
    """
    if fsspec.core.has_magic(path) and path != root:
        named = filesystem.glob(path, detail=True)
    else:
        try:
            named = {path: filesystem.info(path)}
        except FileNotFoundError:
            return {}
    files = {file: info for file, info in named.items() if info["type"] == "file"}
    for directory in named.keys() - files.keys():
        files |= filesystem.find(directory, detail=True)
    files = {file: info for file, info in files.items() if info["type"] == "file"}
    without_size = [file for file, info in files.items() if info["size"] is None]
    return files | dict(zip(without_size, in_threads(filesystem.info, without_size), strict=True))


def _local_files(path: str, root: str) -> set[str]:
    """Like `_remote_files`, for local files: fsspec would skip linked and unreadable directories silently."""
    named = [path]
    if fsspec.core.has_magic(path) and not os.path.lexists(path):
        named = glob.glob(path, recursive=True, include_hidden=True)  # noqa: PTH207 (pathlib doesn't follow links in **)
    files = [file for found in map(Path, named) if os.path.lexists(found) for file in _files_below(found, root)]
    for directory in {file.parent for file in files}:
        _refuse_loop(directory, root)
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            reason = "the name isn't UTF-8, and it becomes part of the ids of the file's documents; rename the file"
            raise UserError(f"{_printable(file)}: {reason}") from None
    return {str(file) for file in files}


def _files_below(path: Path, root: str) -> Iterator[Path]:
    """The file at `path`, or all files below the directory `path`. Follows links."""
    if path.is_file():
        yield path
    elif path.is_dir():
        _refuse_loop(path, root)
        _refuse_closed(path)
        try:
            entries = list(path.iterdir())
        except PermissionError:
            raise _closed(path) from None
        for entry in entries:
            yield from _files_below(entry, root)
    elif path.is_symlink():
        raise UserError(f"{_printable(path)}: links to {_printable(path.readlink())}, which doesn't exist")
    else:
        raise UserError(f"{_printable(path)}: expected a file or a directory, found a pipe, socket or device")


def _refuse_closed_way(path: str) -> None:
    """Raises UserError if a directory on the way to `path`, a path or glob, can't be searched."""
    parts = PurePosixPath(path).parts
    is_glob = not os.path.lexists(path)
    for number in range(1, len(parts)):
        above = str(PurePosixPath(*parts[:number]))
        found = [above]
        if is_glob and fsspec.core.has_magic(above):
            found = glob.glob(f"{above}/", recursive=True, include_hidden=True)  # noqa: PTH207 (as below)
        for directory in found:
            if Path(directory).is_dir():
                _refuse_closed(directory, is_listed=is_glob and fsspec.core.has_magic(parts[number]))


def _refuse_closed(directory: str | Path, is_listed: bool = True) -> None:
    if not os.access(directory, os.X_OK | (os.R_OK if is_listed else 0), effective_ids=True):
        raise _closed(directory)


def _closed(directory: str | Path) -> UserError:
    return UserError(f"{_printable(Path(directory))}: no permission to list this directory")


def _refuse_loop(directory: Path, root: str) -> None:
    """Raises UserError if the path from `root` to `directory` passes through one directory twice."""
    way = [place.resolve() for place in (directory, *directory.parents) if place.is_relative_to(root)]
    if len(set(way)) < len(way):
        raise UserError(f"{_printable(directory)}: links to a directory above itself; remove the link")


def _printable(path: str | Path) -> str:
    r"""A path with escapes for control characters and for bytes that aren't UTF-8: "caf\xe9.txt"."""
    return printable(os.fsencode(path).decode(errors="backslashreplace"))


def shared(files: Sequence[InputFile], config: CorpusConfig) -> list[list[InputFile]]:
    """`files`, in order, in the groups that units read: neighbours of a source, if they are small.

    The groups depend on the files alone, not on the number of workers.
    """
    most = min(config.bytes_per_shared_unit, config.bytes_per_unit)
    return neighbours(files, lambda file: max(file.bytes, _OPENING), most)


def pieces(file: InputFile, bytes_per_unit: int, corpus: Store, save: bool = True) -> list[Range]:
    """The pieces of `file`, one for each unit: several for a large Wikipedia dump with an index, else the whole file.

    Reading the index takes long, so the pieces are saved in the corpus, unless `save` is false.
    """
    index = index_of(file.path)
    if file.source.format != "wikipedia" or file.bytes <= bytes_per_unit or index == file.path:
        return [Range()]
    plan = f".stages/plans/{fingerprint([file.path, file.bytes, file.stamp, bytes_per_unit])}.json"
    cuts = corpus.read_valid_json(plan, list[Range])
    if cuts is None:
        if not stores.exists(index):
            print(f"{file.path}: one worker reads all of it; put its index, {index}, beside it", file=sys.stderr)
            return [Range()]
        try:
            cuts = ranges(file.path, index, bytes_per_unit)
        except DamagedInput:
            cuts = [Range()]  # reading the whole file reports where the damage is
        if save:
            corpus.write_json(plan, cuts)
    return cuts


def _root(path: str, local: bool) -> str:
    """The folder above the first pattern in `path`. The names of matching files are relative to this folder.

    A local file may have the name of a pattern: "[1] a.jsonl".
    """
    folder = PurePosixPath(path).parent
    if local and os.path.lexists(path):
        return str(folder)
    magic = (position for position, part in enumerate(folder.parts) if fsspec.core.has_magic(part))
    return str(PurePosixPath(*folder.parts[: next(magic, len(folder.parts))]))
