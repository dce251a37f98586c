"""Lists the files of a source, and divides them into the pieces that units read."""

import glob
import hashlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from data_pipeline.base import hub, stores
from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted, first_few, masked, printable
from data_pipeline.base.open_store import open_store
from data_pipeline.base.paths import opening
from data_pipeline.base.store import Store, in_threads
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.record import Input, Range
from data_pipeline.stages.output import FINISHED, STAGES, WRITTEN, is_begun, refuse_inputs_in
from data_pipeline.stages.parts import neighbours
from data_pipeline.stages.revisions import pinned

_OPENING = 4096  # the size that a file counts as at least: opening it takes as long as reading so many bytes
_SHOWN = 3  # corpora, and hidden files, in a message
_STAMPS = (  # keys of listings, by which file systems tell that a file has changed; new ones go to the end
    *("mtime", "ETag", "blob_id", "LastModified", "etag", "Last-Modified", "last_modified"),
    *("Content-MD5", "Digest", "modify", "modificationTime"),
)
_SAMPLED = 1 << 14  # bytes of each sample of a local file
_FOLDER_MARKERS = ("/", "_$folder$")  # ends of the names of empty objects that consoles and Hadoop write for folders


class NoSuchFile(UserError):
    """No file has the path, or matches the glob."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of a source.

    Attributes:
        name: the path relative to the source's root.
        stamp: changes when the file changes: a store's ETag or time of change, the Hub's blob id, or a local file's
            time of change and a checksum of its head, middle and tail. "" if a store has none.
        sha256: the checksum that the store publishes; "" if none.
    """

    source: SourceConfig
    path: str
    name: str
    bytes: int
    stamp: str
    sha256: str = ""


@dataclass(frozen=True)
class Inputs:
    """What the paths of sources match.

    Attributes:
        files: the files to read, in the order of their documents' ids.
        hidden: the names of hidden files and folders, which are left out.
    """

    files: list[InputFile]
    hidden: list[str]

    @property
    def left_out(self) -> str:
        """What is left out, and how to read it; "" if nothing is."""
        if not self.hidden:
            return ""
        names = first_few([printable(name) for name in self.hidden], _SHOWN)
        ending = "" if len(self.hidden) == 1 else "s"
        return (
            f"{len(self.hidden):,} hidden file{ending} or folder{ending} ({names}); "
            "to read hidden files, set `hidden: true` in the source, or name them in its path"
        )


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


def inputs_of(config: CorpusConfig) -> Inputs:
    """The files of all sources. A line on stderr for each source counts the hidden files that are left out.

    Raises what `list_inputs` raises, and UserError if a build would replace or remove files of the user in its output.
    """
    output = config.output if is_begun(open_store(config.output, at_start=True)) else None
    files, hidden = list[InputFile](), list[str]()
    for source in config.sources:
        found = list_inputs(source, output=output)
        if found.hidden:
            print(f"source {source.name!r}: left out {found.left_out}", file=sys.stderr)
        files += found.files
        hidden += found.hidden
    refuse_inputs_in(config.output, files)
    return Inputs(files, hidden)


def list_inputs(source: SourceConfig, kind: str = "source", output: str | None = None) -> Inputs:
    """The files that match a source's path, and what is hidden there. A directory means all files below it.

    `kind`: what messages call the source. `output`: the path or URL of the corpus to build. Files that a build has
    written there, and corpora below the source, are left out, which a line on stderr says. Hidden files and folders are
    left out, too: those whose names begin with a dot and, of a whole repository of the Hugging Face Hub, its README.
    `source.hidden`, or a hidden name in the path, takes them. The paths of files of the Hub have the branch's current
    commit.

    Raises NoSuchFile if a path or glob matches no file, and UserError for files that can't be read: a broken link, a
    directory that links to one above it or can't be listed, a name that isn't UTF-8.
    """
    found: dict[str, InputFile] = {}
    hidden: dict[str, None] = {}
    for pattern in [source.path] if isinstance(source.path, str) else source.path:
        with opening(pattern):
            matching = _matching(pattern, source, kind, output)
        hidden |= dict.fromkeys(matching.hidden)
        for file in matching.files:
            if file.name in found:
                other = f"{kind} {source.name!r} already has a file {file.name!r}"
                raise UserError(f"{file.path.removeprefix('file://')}: {other}; put this one in a separate {kind}")
            found[file.name] = file
    return Inputs([found[name] for name in sorted(found, key=lambda name: f"{name}/")], [*hidden])


@dataclass
class _Hidden:
    """Tells which files and folders below `root` are hidden, and collects their names.

    Attributes:
        shown: whether hidden files are read.
        readme: whether a README in `root` is hidden.
        names: the names of the hidden files and folders that were asked for, relative to `root`.
    """

    root: str
    shown: bool
    readme: bool
    names: set[str] = field(default_factory=set)

    def has(self, path: str | Path) -> bool:
        """Whether the file or folder at `path`, or a folder between `root` and it, is hidden."""
        parts = () if self.shown else PurePosixPath(path).relative_to(self.root).parts
        number = next((number for number, part in enumerate(parts, 1) if _is_hidden(part)), 0)
        if self.readme and len(parts) == 1 and parts[0].startswith("README"):
            number = 1
        if number:
            self.names.add("/".join(parts[:number]))
        return number > 0


def _is_hidden(part: str) -> bool:
    """Whether a part of a path begins with a dot. `.stages` is left out with the corpus above it."""
    return part.startswith(".") and part not in (".", "..", STAGES)


def _matching(pattern: str, source: SourceConfig, kind: str, output: str | None) -> Inputs:
    """The files that match one path or glob of a source."""
    at_commit = pinned(pattern)
    filesystem, path = stores.filesystem(at_commit)
    local = stores.is_local(filesystem)
    if local:
        _refuse_closed_way(path, source.hidden)
    folder = is_folder(at_commit)
    is_glob = not folder and fsspec.core.has_magic(path) and not _is_there(at_commit, path, local)
    root = path if folder else _root(path, is_glob)
    named = PurePosixPath(path).relative_to(root).parts
    place = hub.parse(at_commit)
    whole_repository = place is not None and set(place.path) <= {"*", "/"}
    hidden = _Hidden(root, source.hidden or any(map(_is_hidden, named)), whole_repository)
    if local:
        files = {file: filesystem.info(file) for file in _local_files(path, is_glob, hidden)}
    else:
        found_there = partial(_remote_files, filesystem, path, is_glob)
        files = stores.with_retries(found_there, pattern, stores.LISTING_SECONDS)
        files = {file: info for file, info in files.items() if not hidden.has(file)}
    if built := _of_corpora(files, path, root, output, local):
        shown = first_few(sorted(set(built.values())), _SHOWN)
        reason = f"{counted(len(built), 'file')} of corpora that were built there ({shown})"
        if len(built) == len(files):
            raise UserError(f"{pattern}: has nothing but {reason} (path of {kind} {source.name!r})")
        print(f"{masked(pattern)}: left out {reason}", file=sys.stderr)
        files = {file: info for file, info in files.items() if file not in built}
    listing = list[InputFile]()
    if not files and hidden.names:
        nothing = Inputs([], sorted(hidden.names)).left_out
        raise UserError(f"{pattern}: has nothing but {nothing} (path of {kind} {source.name!r})")
    if not files:
        stores.check_bucket(pattern)
        raise NoSuchFile(f"{pattern}: no such file (path of {kind} {source.name!r})")
    sizes = [(file, info["size"]) for file, info in sorted(files.items())]
    samples = in_threads(_samples_checksum, sizes) if local else [""] * len(files)
    for (file, _), sample in zip(sizes, samples, strict=True):
        info = files[file]
        name = str(PurePosixPath(file).relative_to(root))
        name = name if local else masked(name)  # of a web server, it may end in "?token=…"
        stamp = next(filter(None, map(info.get, _STAMPS)), "")
        known = "" if local or place else _url_of(file, pattern, path)
        url, size = known or filesystem.unstrip_protocol(file), info["size"] or 0
        listing.append(InputFile(source, url, name, size, f"{stamp}{sample}", hub.sha256_of(info)))
    return Inputs(listing, sorted(hidden.names))


def _url_of(file: str, url: str, path: str) -> str:
    """The URL of `file`, a path within the file system of `url`, whose own path there is `path`; "" if unknown.

    What only URLs have stays: fsspec makes "ftp:///data/a" of /data/a on the server of ftp://me@host/data/*.
    """
    scheme, _, rest = url.partition("://")
    of_url, of_path, of_file = (text.rstrip("/").split("/") for text in (rest, path, file))
    pairs = zip(reversed(of_url), reversed(of_path), strict=False)
    same = sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], pairs))
    before = of_path[: len(of_path) - same]
    if "::" in url or not rest or of_file[: len(before)] != before:
        return ""
    return f"{scheme}://{'/'.join([*of_url[: len(of_url) - same], *of_file[len(before) :]])}"


def _of_corpora(files: Collection[str], path: str, root: str, output: str | None, local: bool) -> dict[str, str]:
    """The `files` below `root` that a build has written, with the directories of their corpora.

    A folder is a corpus if it has `.stages`, or manifest.json and blocks.parquet. If the user's `path` itself contains
    `documents`, the documents of corpora are read.
    """
    own, place = "", (output or "").removeprefix("file://")
    if place and ("://" in place) != local:
        own = str(Path(place).resolve()) if local else stores.filesystem(place)[1].rstrip("/")
    means_documents = "documents" in PurePosixPath(path).parts

    remote = set() if local else {*files, *(str(above) for file in files for above in PurePosixPath(file).parents)}

    def exists(name: str) -> bool:
        return Path(name).exists() if local else name in remote

    @cache
    def store(directory: str) -> str:
        if len(directory) <= len(root):
            return ""
        if above := store(str(PurePosixPath(directory).parent)):
            return above
        if PurePosixPath(directory).name == STAGES:
            return str(PurePosixPath(directory).parent)
        if own == (str(Path(directory).resolve()) if local else directory):
            return directory
        if means_documents:
            return ""
        finished = all(exists(f"{directory}/{name}") for name in FINISHED)
        return directory if finished or exists(f"{directory}/{STAGES}") else ""

    built = {file: found for file in files if (found := store(str(PurePosixPath(file).parent)))}
    if exists(f"{root}/{STAGES}") and not means_documents:
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


def _is_there(location: str, path: str, local: bool) -> bool:
    """Whether a file or folder has this name, which may be that of a pattern: "[1] a.jsonl"."""
    return os.path.lexists(path) if local else stores.exists(location, stores.LISTING_SECONDS)


def _remote_files(filesystem: fsspec.AbstractFileSystem, path: str, is_glob: bool) -> dict[str, dict[str, Any]]:
    """The files that match `path`, and all files below directories that match; with the listing's information.

    A request for each of 50,000 files would take an hour. Only web servers, whose listings have no sizes, get one for
    each file.
    """
    if is_glob:
        named = filesystem.glob(path, detail=True)
    else:
        try:
            named = {path: filesystem.info(path)}
        except FileNotFoundError:
            return {}
    files = {file: info for file, info in named.items() if info["type"] == "file"}
    for directory in named.keys() - files.keys():
        files |= filesystem.find(directory, detail=True)
    files = {file: info for file, info in files.items() if info["type"] == "file" and not _is_marker(file, info)}
    without_size = [file for file, info in files.items() if info["size"] is None]
    return files | dict(zip(without_size, in_threads(filesystem.info, without_size), strict=True))


def _is_marker(file: str, info: dict[str, Any]) -> bool:
    """Whether an object stands for a folder."""
    return info["size"] == 0 and file.endswith(_FOLDER_MARKERS)


def _local_files(path: str, is_glob: bool, hidden: _Hidden) -> set[str]:
    """Like `_remote_files`, for local files that aren't `hidden`: fsspec would skip linked and unreadable directories
    silently."""
    named = [path]
    if is_glob:
        named = glob.glob(path, recursive=True, include_hidden=True)  # noqa: PTH207 (pathlib doesn't follow links in **)
    files = [file for found in map(Path, named) if os.path.lexists(found) for file in _files_below(found, hidden)]
    for directory in {file.parent for file in files}:
        _refuse_loop(directory, hidden.root)
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            reason = "the name isn't UTF-8, and it becomes part of the ids of the file's documents; rename the file"
            raise UserError(f"{_printable(file)}: {reason}") from None
    return {str(file) for file in files}


def _files_below(path: Path, hidden: _Hidden) -> Iterator[Path]:
    """The file at `path`, or all files below the directory `path` that aren't `hidden`. Follows links."""
    if hidden.has(path):
        return
    if path.is_file():
        yield path
    elif path.is_dir():
        _refuse_loop(path, hidden.root)
        _refuse_closed(path)
        try:
            entries = list(path.iterdir())
        except PermissionError:
            raise _closed(path) from None
        for entry in entries:
            yield from _files_below(entry, hidden)
    elif path.is_symlink():
        raise UserError(f"{_printable(path)}: links to {_printable(path.readlink())}, which doesn't exist")
    else:
        raise UserError(f"{_printable(path)}: expected a file or a directory, found a pipe, socket or device")


def _refuse_closed_way(path: str, hidden: bool) -> None:
    """Raises UserError if a directory on the way to `path`, a path or glob, can't be searched.

    `hidden`: whether wildcards match hidden directories, too.
    """
    parts = PurePosixPath(path).parts
    is_glob = not os.path.lexists(path)
    for number in range(1, len(parts)):
        above = str(PurePosixPath(*parts[:number]))
        found = [above]
        if is_glob and fsspec.core.has_magic(above):
            found = glob.glob(f"{above}/", recursive=True, include_hidden=hidden)  # noqa: PTH207 (as below)
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


def pieces(file: InputFile, bytes_per_unit: int, store: Store) -> list[Range]:
    """The pieces of `file`, one for each unit: several for a large file of a format that can divide it, else the whole.

    Finding them may take long, so several pieces are saved in the corpus.
    """
    known = FORMATS[file.source.format]
    if not known.divisible or file.bytes <= bytes_per_unit:
        return [Range()]
    plan = f".stages/plans/{fingerprint([file.path, file.bytes, file.stamp, bytes_per_unit])}.json"
    cuts = store.read_valid_json(plan, list[Range])
    if cuts is None:
        cuts = known.ranges(Input(file.path, options=file.source.options), bytes_per_unit)
        if len(cuts) > 1:
            store.write_json(plan, cuts)
    return cuts


def _root(path: str, is_glob: bool) -> str:
    """The folder above the file `path`, or above the first pattern in it. Names of matching files are relative to this
    folder."""
    folder = PurePosixPath(path).parent
    if not is_glob:
        return str(folder)
    magic = (position for position, part in enumerate(folder.parts) if fsspec.core.has_magic(part))
    return str(PurePosixPath(*folder.parts[: next(magic, len(folder.parts))]))
