"""Finds the records that a user names by id or URL."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from data_pipeline.dedup.keys import hash64, smallest_keys
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.foundation.progress import track
from data_pipeline.sources.record import ReadStats
from data_pipeline.stages.documents import read_records
from data_pipeline.text.urls import normalize_url
from data_pipeline.tools.provenance.finished_build import BuiltInput, FinishedBuild


def first_ids(directory: Path, split: str, number: int) -> list[str]:
    """The ids of the first documents of a split, at most `number`; none where the corpus lacks its documents."""
    for path in sorted((directory / "documents").glob("*.parquet")):
        found = pq.read_table(path, columns=["id"], filters=[("split", "=", split)])["id"].slice(0, number).to_pylist()
        if found:
            return found
    return []


def records_named(build: FinishedBuild, name: str) -> list[tuple[BuiltInput, set[int]]]:
    """The inputs that have the document `name`, an id or a URL, with the ordinals of its records.

    URLs are compared as deduplication does. Raises UserError if no input can have it.
    """
    found = list(_by_url(build, normalize_url(name))) if "://" in name else _by_id(build, name)
    if not found:
        raise UserError(f"{name}: none of the {len(build.inputs):,} inputs of {build.location} has this document")
    return found


def _by_id(build: FinishedBuild, identity: str) -> list[tuple[BuiltInput, set[int]]]:
    file, _, digits = identity.rpartition("/")
    if not digits.isdecimal():
        raise UserError(f"{identity}: expected a URL, or an id: the source, the file and the record's number, by /")
    before = [built for built in build.inputs.get(file, []) if built.first_ordinal <= int(digits)]
    return [(max(before, key=lambda built: built.first_ordinal), {int(digits)})] if before else []


def _by_url(build: FinishedBuild, url: str) -> Iterator[tuple[BuiltInput, set[int]]]:
    inputs = [built for ranges in build.inputs.values() for built in ranges]
    units = _units_with(build, url)
    for built in inputs:
        if built.unit.name in units and (ordinals := _ordinals_with(build, built, url)):
            yield built, ordinals
    if not units:  # a page that cleaning dropped, in any of the inputs
        for built in track(inputs, len(inputs), "looking for the URL"):
            if ordinals := _ordinals_with(build, built, url):
                yield built, ordinals
                return


def _units_with(build: FinishedBuild, url: str) -> set[str]:
    """The units that have `url`: among their keys of URLs or, if URLs weren't deduplicated, among their documents."""
    if build.config.dedup.urls:
        key: set[tuple[int, ...]] = {(hash64(url),)}
        keys = {part.name: file for part, file in zip(build.in_order, build.steps[0].files, strict=True)}
        return {
            unit.name
            for unit in build.documents
            if smallest_keys(build.directory, [keys[part.name] for part in unit.result.parts], 1, key)
        }
    likely = set()
    for unit in build.documents:
        for part in unit.result.parts:
            urls = pq.read_table(build.directory / part.path, columns=["url"])["url"].to_pylist()
            if any(normalize_url(one) == url for one in urls):
                likely.add(unit.name)
                break
    return likely


def _ordinals_with(build: FinishedBuild, built: BuiltInput, url: str) -> set[int]:
    ordinals = set()
    try:
        for record in read_records(*build.spec_of(built), ReadStats()):
            if record.url and normalize_url(record.url) == url:
                ordinals.add(record.ordinal)
    except DamagedInput:
        pass  # records after the damage aren't in the corpus
    return ordinals
