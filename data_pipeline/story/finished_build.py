"""A finished build: its settings, its inputs and its parts, as they lie in the corpus's directory."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_pipeline import manifest
from data_pipeline.config import CorpusConfig
from data_pipeline.execution.parts import Part, parts_of
from data_pipeline.execution.work_units import Finished, Unit, read_finished
from data_pipeline.foundation.config_file import check, load
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.json_file import read_json
from data_pipeline.stages import deduplication, documents
from data_pipeline.stages.documents import DocumentsResult, DocumentsSpec


@dataclass(frozen=True)
class FinishedBuild:
    """A corpus with the files of its stages. `location` is what the user named."""

    location: Path
    directory: Path
    config: CorpusConfig

    @cached_property
    def documents(self) -> list[Finished[DocumentsResult]]:
        """The units that read the inputs, in order."""
        return read_finished(documents.STAGE, self.directory)

    @cached_property
    def units(self) -> dict[str, Unit[DocumentsSpec]]:
        """The same units by name, as they are planned from the inputs that are there now."""
        return {unit.name: unit for unit in documents.plan(self.config, self.directory)}

    @cached_property
    def in_order(self) -> list[Part]:
        """The parts before deduplication, in the order of their ids."""
        return sorted(parts_of(self.documents), key=lambda part: part.first_id)

    @cached_property
    def steps(self) -> list[deduplication.Decided]:
        """The steps of deduplication, in order."""
        return deduplication.decided(self.directory, self.config, self.in_order)

    def spec_of(self, unit: Finished[DocumentsResult]) -> DocumentsSpec:
        """How an input was read. Raises FailedError if it, or the settings, have changed since."""
        planned = self.units.get(unit.name)
        name = f"{unit.result.source}/{unit.result.file}"
        if planned is None or documents.STAGE.fingerprint(planned) != unit.fingerprint:
            raise FailedError(f"{self.directory}: {name} or its settings have changed since; run data-pipeline build")
        return planned.spec


def open_build(location: Path) -> FinishedBuild:
    """The build in a corpus's directory, or that of a corpus file.

    Raises UserError if there is none, or if it was made with other settings than the corpus file has now.
    """
    if location.is_dir():
        settings = location / manifest.SETTINGS
        try:
            config = check(read_json(settings, dict[str, Any]), CorpusConfig, str(settings))
        except FileNotFoundError:
            reason = "no such file; name the corpus file (YAML), or run data-pipeline build again"
            raise UserError(f"{settings}: {reason}") from None
        build = FinishedBuild(location, location, config)
    else:
        config = load(location, [], CorpusConfig)
        build = FinishedBuild(location, Path(config.output), config)
    if not build.documents:
        raise UserError(f"{build.directory}: no finished build; run data-pipeline build")
    recorded = build.directory / "manifest.json"
    if recorded.exists() and read_json(recorded, dict[str, Any]).get("config") != manifest.lineage(config):
        raise UserError(f"{location}: {build.directory} was built with other settings; run data-pipeline build")
    return build
