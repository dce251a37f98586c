"""The stage that chooses, in a large corpus, the documents that the tokenizer's sample may have.

The sample is what comes first in the order of a hash. Which hashes these may be is known from the size of the corpus,
so every unit keeps its documents below a bound, and the tokenizer reads only those. Otherwise one core would read all
documents: half an hour of C4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path

from data_pipeline.config import TokenizerConfig
from data_pipeline.execution.parts import SCHEMA, Part, part_file, row_groups
from data_pipeline.execution.work_units import Finished, Result, Stage, Unit, outputs_of
from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.tokenizer.training import sample_rank

_MORE = 2  # times the sample: documents aren't equally long, and some are held out
_LARGE = 4  # times the sample: below, half of all documents or more would be candidates
_UNIT_BYTES, _UNITS = 64_000_000, 1000  # text of a unit at least, and units at most, each of which writes a file


@dataclass(frozen=True)
class SamplingSpec:
    """The files of some parts, and the bound of the hashes of the documents to keep."""

    parts: list[str]
    seed: int
    below: int
    output: str


@dataclass(frozen=True)
class Candidates(Result):
    """How many documents a unit kept, and the bytes of their text."""

    kept: int
    bytes: int


def plan(config: TokenizerConfig, seed: int, parts: Sequence[Part]) -> list[Unit[SamplingSpec]]:
    """A unit for each group of neighbouring parts; none if no tokenizer is trained, or the corpus is small: less than
    several times as large as the sample, by both of its bounds."""
    text, documents = sum(part.text_bytes for part in parts), sum(sum(part.documents.values()) for part in parts)
    is_large = text > _LARGE * config.sample_bytes or documents > _LARGE * config.sample_documents
    if config.path is not None or not is_large:
        return []
    share = min(config.sample_bytes / text, config.sample_documents / documents)
    below = int(_MORE * share * 2**64)
    ends = accumulate(part.text_bytes for part in parts)
    count = min(_UNITS, max(1, text // _UNIT_BYTES))
    numbers = [max(0, end - 1) * count // text for end in ends]
    units = []
    for number, group in groupby(zip(numbers, parts, strict=True), key=lambda pair: pair[0]):
        own = [part for _, part in group]
        name = f"part-{number:05d}"
        output = f".stages/{STAGE.name}/{name}.parquet"
        inputs = fingerprint([seed, below, [part.checksums for part in own]])
        spec = SamplingSpec([part.path for part in own], seed, below, output)
        units.append(Unit(name, spec, inputs, (output,), bytes=sum(part.text_bytes for part in own)))
    return units


def keep_candidates(corpus: Path, spec: SamplingSpec) -> Candidates:
    """Writes the training documents of some parts whose hashes are below the bound."""
    with part_file(corpus / spec.output) as file:
        for part in spec.parts:
            for group in row_groups(corpus / part):
                splits = group.column("split")
                kept = [
                    number
                    for number, identity in enumerate(group.column("id"))
                    if splits[number] == "train" and sample_rank(spec.seed, identity) < spec.below
                ]
                for document in group.documents(SCHEMA.names, kept) if kept else []:
                    file.add(document)
    return Candidates(file.documents.total(), file.text_bytes)


def files_to_read(config: TokenizerConfig, parts: Sequence[Part], units: Sequence[Finished[Candidates]]) -> list[str]:
    """The files with the candidates if they are enough for the sample, else those of all documents."""
    kept, text = sum(unit.result.kept for unit in units), sum(unit.result.bytes for unit in units)
    if kept >= config.sample_documents or text >= config.sample_bytes:
        return list(outputs_of(units))
    return [part.path for part in parts]


STAGE = Stage("tokenizer-sample", 1, keep_candidates, "lower tokenizer.sample_bytes")
