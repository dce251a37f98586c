"""Which files a source names, and the pieces they are read in."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import fsspec

from data_pipeline.atomic import fingerprint, write_json
from data_pipeline.config import SourceConfig
from data_pipeline.errors import DamagedInput, UserError
from data_pipeline.sources.multistream import index_of, ranges
from data_pipeline.sources.record import Input


@dataclass(frozen=True)
class InputFile:
    """A file of a source. `name` is its path relative to the source's root; `stamp` changes when the file does."""

    source: SourceConfig
    path: str
    name: str
    bytes: int
    stamp: str


def list_files(source: SourceConfig) -> list[InputFile]:
    """The files a source's path names, sorted by name. Raises UserError where a path or glob names none."""
    found: dict[str, InputFile] = {}
    for pattern in [source.path] if isinstance(source.path, str) else source.path:
        filesystem, path = fsspec.core.url_to_fs(pattern)
        paths = sorted(filesystem.glob(path)) if fsspec.core.has_magic(path) else [path]
        if filesystem.isdir(path):
            paths = sorted(filesystem.find(path))
            root = PurePosixPath(path)
        else:
            root = PurePosixPath(*_until_magic(PurePosixPath(path)))
        files = [candidate for candidate in paths if filesystem.isfile(candidate)]
        if not files:
            raise UserError(f"{pattern}: no such file (path of source {source.name!r})")
        for file in files:
            info = filesystem.info(file)
            name = str(PurePosixPath(file).relative_to(root))
            if name in found:
                raise UserError(
                    f"{file}: source {source.name!r} already has a file {name!r}; give it a source of its own"
                )
            stamp = str(info.get("mtime") or info.get("ETag") or info.get("LastModified") or "")
            found[name] = InputFile(source, filesystem.unstrip_protocol(file), name, info["size"], stamp)
    return [found[name] for name in sorted(found)]


def pieces(file: InputFile, bytes_per_unit: int, plans: Path) -> list[Input]:
    """What the units of `file` read: byte ranges of a large Wikipedia dump of many bz2 streams, else the whole file.

    Finding the streams of a dump without its index takes as long as reading it, so the cuts are kept in `plans`.
    """
    options = file.source.options
    if file.source.format != "wikipedia" or file.bytes <= bytes_per_unit:
        return [Input(file.path, options=options)]
    plan = plans / f"{fingerprint([file.path, file.bytes, file.stamp, bytes_per_unit])}.json"
    if not plan.exists():
        index = index_of(file.path)
        exists = index != file.path and fsspec.core.url_to_fs(index)[0].exists(index)
        try:
            cuts = ranges(file.path, index if exists else None, bytes_per_unit)
        except DamagedInput:
            cuts = [Input(file.path)]  # read from the start, it shows where the damage is
        write_json(plan, [[cut.start, cut.stop, cut.first_ordinal] for cut in cuts])
    cuts = json.loads(plan.read_text())
    return [Input(file.path, start, stop, first_ordinal, options) for start, stop, first_ordinal in cuts]


def _until_magic(path: PurePosixPath) -> list[str]:
    parts = list(path.parent.parts)
    magic = next((position for position, part in enumerate(parts) if fsspec.core.has_magic(part)), len(parts))
    return parts[:magic]
