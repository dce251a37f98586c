"""Decides whether a build may write to its output: no build replaces or removes a file that no build has written."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.base import stores
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import first_few, printable
from data_pipeline.base.paths import opening
from data_pipeline.base.store import Store
from data_pipeline.stages.kinds import KINDS

if TYPE_CHECKING:
    from data_pipeline.stages.inputs import InputFile

STAGES = ".stages"
FINISHED = ("manifest.json", "blocks.parquet")  # the files that show, without `.stages`, that a build has finished
WRITTEN = {  # the files and folders of a corpus's directory
    *(kind.folder.split("/")[0] for kind in KINDS if kind.folder),
    *(*FINISHED, "lineage.parquet", "report.json", "report.md"),
}
_SHOWN = 3


def is_begun(store: Store) -> bool:
    """Whether a build has written to the output `store` before.

    Raises UserError if no build has, and the output has files or folders with names that a build writes.
    """
    with opening(f"output: {store}"):
        names = {*store.names(deep=False), *store.folders("")}
    if STAGES in names or names.issuperset(FINISHED):
        return True
    if taken := sorted(names & WRITTEN):
        found = f"has {first_few(taken, _SHOWN)}, which no build has written (it has no {STAGES})"
        raise UserError(f"output: {store} {found}; a build would replace them: {_way_out(str(store))}")
    return False


def refuse_inputs_in(output: str, files: Sequence["InputFile"]) -> None:
    """Raises UserError if one of `files`, the inputs of a build, is below its `output`."""
    filesystem, path = stores.filesystem(output)
    local, protocols = stores.is_local(filesystem), stores.protocols(filesystem)
    top = str(Path(path).resolve()) if local else path.rstrip("/")
    resolved = cache(os.path.realpath)  # many files share a folder
    inside = cache(lambda url: stores.filesystem(url)[1])  # a URL may also have the store's address
    for file in files:
        protocol, _, place = file.path.partition("://")
        folder = place.rpartition("/")[0]
        if local and protocol == "file":
            folder = resolved(folder)
        elif protocol in protocols:
            folder = inside(f"{protocol}://{folder}")
        if protocol in protocols and f"{folder}/".startswith(f"{top}/"):
            read = f"holds {printable(file.path.removeprefix('file://'))}, which source {file.source.name!r} reads"
            raise UserError(f"output: {output} {read}; a build replaces files in its output: {_way_out(output)}")


def _way_out(output: str) -> str:
    return f"choose a folder without files of your own, such as {output.rstrip('/')}/corpus"
