"""Reads a finished build from its corpus: settings, inputs, parts and records."""

import contextlib
import fnmatch
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_pipeline.base.config_file import check, load
from data_pipeline.base.errors import DamagedInput, FailedError, UserError
from data_pipeline.base.open_store import open_store
from data_pipeline.base.progress import Progress, track
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import Corpus, open_corpus
from data_pipeline.corpus.corpus import MANIFEST
from data_pipeline.corpus.documents import all_documents
from data_pipeline.engine.work_units import Finished, Unit, read_finished
from data_pipeline.loading.reader import BlockStore
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.record import ReadStats
from data_pipeline.stages import dedup, documents, tokens, write_manifest
from data_pipeline.stages.documents import DocumentsResult, DocumentsSpec, InputSpec, read_records
from data_pipeline.stages.inputs import files_of
from data_pipeline.stages.parts import Part, WrittenPart, grouped, parts_of
from data_pipeline.stages.stage import DOCUMENTS
from data_pipeline.text.document import normalize_url

_SEARCHED = 200_000  # documents


@dataclass(frozen=True)
class BuiltInput:
    """An input, or a range of one, that a unit has read. `number`: its index among the unit's inputs."""

    unit: Finished[DocumentsResult]
    number: int

    @property
    def first_ordinal(self) -> int:
        return self.unit.result.inputs[self.number].range.first_ordinal

    @property
    def name(self) -> str:
        """The beginning of its documents' ids."""
        return f"{self.unit.result.source}/{self.unit.result.inputs[self.number].file}"


@dataclass(frozen=True)
class FinishedBuild:
    """A corpus with the files of its stages."""

    corpus: Store
    config: CorpusConfig

    @cached_property
    def documents(self) -> list[Finished[DocumentsResult]]:
        """The units that have read the inputs, in order."""
        return read_finished(documents.STAGE, self.corpus)

    @cached_property
    def inputs(self) -> list[BuiltInput]:
        """The inputs, or their ranges, in order."""
        return [BuiltInput(unit, number) for unit in self.documents for number in range(len(unit.result.inputs))]

    @cached_property
    def units(self) -> dict[str, Unit[DocumentsSpec]]:
        """The units of the documents stage by name, planned from today's inputs."""
        return {unit.name: unit for unit in documents.plan(self.config, self.corpus, files_of(self.config))}

    @cached_property
    def in_order(self) -> list[list[Part]]:
        """The parts before deduplication, grouped by unit, in the order of their ids."""
        return dedup.in_order_of_ids(grouped(parts_of(self.documents), self.config))

    @cached_property
    def steps(self) -> list[dedup.Decided]:
        """The steps of deduplication, in order."""
        return dedup.decided(self.corpus, dedup.steps_of(self.config, self.documents), self.in_order)

    def spec_of(self, built: BuiltInput) -> tuple[DocumentsSpec, InputSpec]:
        """How an input was read. Raises FailedError if its unit's inputs, or the settings, have changed since."""
        planned = self.units.get(built.unit.name)
        if planned is None or documents.STAGE.fingerprint(planned) != built.unit.fingerprint:
            neighbours = f" or one of the {len(built.unit.result.inputs):,} inputs that are read with it"
            what = built.name + (neighbours if len(built.unit.result.inputs) > 1 else "")
            raise FailedError(f"{self.corpus}: {what} or its settings have changed since; run data-pipeline build")
        return planned.spec, planned.spec.inputs[built.number]


def open_build(location: str | Path) -> FinishedBuild:
    """The build in a corpus's directory, at its URL, or of a corpus file.

    Raises UserError if there is none, or if its settings differ from the corpus file's.
    """
    corpus = open_store(location)
    if "://" in str(location) or Path(location).is_dir():
        settings = corpus.at(write_manifest.SETTINGS)
        try:
            config = check(corpus.read_json(write_manifest.SETTINGS, dict[str, Any]), CorpusConfig, settings)
        except FileNotFoundError:
            reason = "no such file; name the corpus file (YAML), or run data-pipeline build again"
            raise UserError(f"{settings}: {reason}") from None
    else:
        config = load(Path(location), [], CorpusConfig)
        corpus = open_store(config.output)
    build = FinishedBuild(corpus, config)
    if not build.documents:
        raise UserError(f"{corpus}: no finished build; run data-pipeline build")
    if corpus.exists(MANIFEST) and open_corpus(str(corpus)).manifest.config != write_manifest.recorded(config):
        raise UserError(f"{location}: {corpus} was built with other settings; run data-pipeline build")
    return build


def ids_of_rows(corpus: Corpus, split: str, rows: int) -> list[str]:
    """The ids of the documents that begin in the first `rows` rows of a split, in their order; none if they aren't
    known: rows aren't concatenated text, there are too many documents to look through, or the copy has none.

    The first block says how many documents begin there. The shuffle's hashes say which.
    """
    manifest = corpus.manifest
    sources = manifest.config["sources"]
    settled = manifest.rows.packing == "concatenate" and manifest.rows.apply_at == "load"
    settled &= all(source["format"] in FORMATS for source in sources)
    if not settled or manifest.splits[split].documents > _SEARCHED:
        return []
    block = BlockStore(corpus, split, cached=1).block(0)
    ends = block["row_offsets"]
    begun = int((block["document_offsets"] < ends[min(rows, len(ends) - 1)]).sum())
    together = {source["name"]: FORMATS[source["format"]].stays_together(source["options"]) for source in sources}

    def place(identity: str) -> int:
        return tokens.shuffle_hash(manifest.seed, identity, together[identity.partition("/")[0]])

    found = all_documents(open_store(corpus.location), "id", "split")
    return heapq.nsmallest(begun, (one.id for one in found if one.split == split), key=place)


def first_ids(corpus: Store, split: str, number: int) -> list[str]:
    """The ids of the first documents of a split, at most `number`; none if they can't be traced: the corpus lacks its
    documents or, in a bucket, the files of its build."""
    if "://" in str(corpus) and not corpus.exists(write_manifest.SETTINGS):
        return []
    for name in sorted(fnmatch.filter(corpus.names(DOCUMENTS.folder), f"*/{DOCUMENTS.files}")):
        table = pq.read_table(corpus.readable(name), columns=["id"], filters=[("split", "=", split)])
        if found := table["id"].slice(0, number).to_pylist():
            return found
    return []


def records_named(build: FinishedBuild, name: str) -> list[tuple[BuiltInput, set[int]]]:
    """The inputs that have the document `name`, an id or a URL, with the ordinals of its records.

    URLs are compared as deduplication does. Raises UserError if no input can have it.
    """
    file, _, digits = name.rpartition("/")
    if "://" in name:
        found = list(_by_url(build, normalize_url(name)))
    elif digits.isdecimal():
        before = [one for one in build.inputs if one.name == file and one.first_ordinal <= int(digits)]
        found = [(max(before, key=lambda one: one.first_ordinal), {int(digits)})] if before else []
    else:
        raise UserError(f"{name}: expected a URL, or an id: the source, the file and the record's number, by /")
    if not found:
        inputs = len({one.name for one in build.inputs})
        raise UserError(f"{name}: none of the {inputs:,} inputs of {build.corpus} has this document")
    return found


def _by_url(build: FinishedBuild, url: str) -> Iterator[tuple[BuiltInput, set[int]]]:
    # a part has the URLs of the pages that cleaning kept and, for deduplication, of those that it dropped
    units = {unit.name for unit in build.documents if any(_has_url(build, part, url) for part in unit.result.parts)}
    for built in build.inputs:
        if built.unit.name in units and (ordinals := _ordinals_with(build, built, url)):
            yield built, ordinals
    if not units:  # cleaning dropped the page, which may be in any input
        for built in track(build.inputs, Progress("looking for the URL", len(build.inputs))):
            if ordinals := _ordinals_with(build, built, url):
                yield built, ordinals
                return


def _has_url(build: FinishedBuild, part: WrittenPart, url: str) -> bool:
    addresses = (pq.read_table(build.corpus.readable(name), columns=["url"])["url"].to_pylist() for name in part.files)
    return any(normalize_url(one) == url for of_file in addresses for one in of_file)


def _ordinals_with(build: FinishedBuild, built: BuiltInput, url: str) -> set[int]:
    ordinals = set()
    with contextlib.suppress(DamagedInput):  # records after the damage aren't in the corpus
        for record in read_records(*build.spec_of(built), ReadStats()):
            if record.url and normalize_url(record.url) == url:
                ordinals.add(record.ordinal)
    return ordinals
