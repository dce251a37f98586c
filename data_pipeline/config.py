"""The settings of a corpus file (YAML), with their checks."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from data_pipeline.base import stores
from data_pipeline.base.config_file import Location, Locations, Section, problems
from data_pipeline.corpus.objectives.objective import AnyObjective
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.corpus.tokenizer.config import KINDS, AnyTokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePieceConfig
from data_pipeline.dedup.config import DedupConfig
from data_pipeline.dedup.decontamination import Decontamination, DecontaminationConfig
from data_pipeline.dedup.registry import READS_TEXT, AnyStep
from data_pipeline.dedup.step import KeyStep
from data_pipeline.engine.config import RayConfig
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.record import IdsOption
from data_pipeline.text.cleaning.config import CleaningConfig
from data_pipeline.text.step import Rule, Step

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(FORMATS)]


class SourceConfig(Section):
    """Files of one format."""

    format: FormatName
    """The format of the files."""
    path: Locations
    """The files: a path, a glob, or a list of them, local or as fsspec URLs; `hf://datasets/OWNER/NAME/…` is on the
    Hugging Face Hub."""
    name: str = ""
    """Name of the source, which begins its documents' ids; different for each source. `""`: the format's name."""
    language: str = ""
    """Language of the documents, a BCP 47 tag, instead of the language that they state. `""`: the stated language."""
    options: dict[str, Any] = {}
    """Options of the format."""
    hidden: bool = False
    """Also read hidden files and folders, whose names begin with a dot, and the README of a whole repository of the
    Hugging Face Hub. A path that names a hidden file or folder reads it without this option."""
    split: Literal["train", "validation"] | None = None
    """The split of all documents of the source, for data that is divided already. null: the corpus's `split`
    decides."""
    cleaning: CleaningConfig | None = None
    """Replaces the corpus's section `cleaning` for this source. null: the corpus's section; for pairs, its key `rules`
    alone."""

    @model_validator(mode="before")
    @classmethod
    def _name_defaults_to_format(cls, values: dict) -> dict:
        if isinstance(values, dict) and not values.get("name"):
            values = {**values, "name": values.get("format", "")}
        return values

    @field_validator("name")
    @classmethod
    def _name_is_one_path_part(cls, name: str) -> str:
        if "/" in name:
            raise ValueError("a source's name can't contain '/'")
        return name

    @field_validator("options")
    @classmethod
    def _options_are_the_formats(cls, options: dict[str, Any], others: ValidationInfo) -> dict[str, Any]:
        if (declared := others.data.get("format")) is not None:
            try:
                FORMATS[declared].options.model_validate(options)
            except ValidationError as error:
                lines = problems(error, FORMATS[declared].options)
                raise ValueError("\n".join(f"format {declared}: {line}" for line in lines)) from None
        return options

    @property
    def has_ids(self) -> bool:
        """Whether the documents are lists of integers by an option of the format."""
        return issubclass(FORMATS[self.format].options, IdsOption) and bool(self.options.get("ids"))

    @property
    def together(self) -> int:
        """Number of consecutive documents of a file that stay together in the shuffle; 1: none."""
        return FORMATS[self.format].stays_together(self.options)

    @property
    def pairs(self) -> bool:
        """Whether the documents are text-to-text pairs."""
        return FORMATS[self.format].pairs


class SplitConfig(Section):
    """Which documents are held out."""

    by: Literal["hash", "files", "position"] = "hash"
    """How held-out documents are chosen. `hash`: by the md5 of the normalised URL or, without a URL, of the id.
    `files`: whole files, in the order of the md5 of their names, until they have `validation_fraction` of a source's
    bytes; a source's only file stays for training. `position`: the end of each source. Whole files by their stored
    bytes; the file that is divided, by characters before cleaning."""
    validation_fraction: float = Field(0.001, ge=0, lt=1)
    """The share that is held out for validation: of the documents (`hash`), or of the bytes."""

    @field_validator("validation_fraction")
    @classmethod
    def _holds_something_out(cls, share: float) -> float:
        if share and not _as_fraction(share):
            raise ValueError(f"{share} holds nothing out; expected 0, or at least 1e-9")
        return share

    @property
    def ratio(self) -> tuple[int, int]:
        """(p, q): a document is held out if md5 mod q < p. 0.001 gives TFDS's rule, md5 mod 1000 == 0."""
        return _as_fraction(self.validation_fraction).as_integer_ratio()


def _as_fraction(share: float) -> Fraction:
    """The fraction nearest to `share` whose denominator is at most 1e9."""
    return Fraction(str(share)).limit_denominator(10**9)


class RowsConfig(Section):
    """How documents become rows, and rows become examples."""

    packing: Literal["concatenate", "complete_documents", "examples"] = "concatenate"
    """How documents become rows. `concatenate`: end to end, cut to the objective's length. `complete_documents`: one
    document, or one pair, a row. `examples`: several pairs a row."""
    end_of_document: bool = False
    """Put an EOS token after each document, for models that generate whole documents."""
    objective: AnyObjective = SpanCorruption()
    """How a row becomes an example: the inputs and targets that a model learns from."""
    apply_at: Literal["load", "build"] = "load"
    """When the objective is applied. `load`: when rows are loaded, anew in every epoch. `build`: once, when shards are
    built."""

    @model_validator(mode="after")
    def _packing_suits_the_objective(self) -> "RowsConfig":
        if self.packing not in self.objective.packings:
            suitable = " or ".join(self.objective.packings)
            raise ValueError(f"packing: {self.objective.name} needs {suitable}, not {self.packing}")
        if self.packing == "examples" and self.apply_at == "load":
            raise ValueError("apply_at: packed examples are made when shards are built; set it to build, not load")
        if self.end_of_document and "target_start" in self.objective.columns:
            raise ValueError(f"end_of_document: {self.objective.full_name} puts an EOS token after each target itself")
        return self


class ShardsConfig(Section):
    """The size of the shards, which are WebDataset tars."""

    rows_per_block: PositiveInt = 1024
    """Number of rows in a block, which is read and checked at once."""
    blocks_per_shard: PositiveInt = 64
    """Number of blocks in a shard. A worker holds the tokens of one shard in memory."""


def _has_text(tokenizer: Any) -> bool:
    """Whether the kind of tokenizer in these settings reads text."""
    kind = tokenizer.get("kind") if isinstance(tokenizer, dict) else getattr(tokenizer, "kind", None)
    return KINDS[kind].has_text if isinstance(kind, str) and kind in KINDS else True


_REPLACED = ("cleaning", "dedup", "decontamination")  # by the list `steps`


def while_reading(steps: Sequence[Step]) -> list[Rule]:
    """The first of `steps`, up to one that compares documents: these rules are applied while inputs are read."""
    rules = takewhile(lambda step: isinstance(step, Rule) and not step.prepared, steps)
    return [step for step in rules if isinstance(step, Rule)]


class CorpusConfig(Section):
    """A corpus file: which texts to read, and how they become shards."""

    other_files = {"data": "this is a run file, not a corpus file; train with launch local {}"}

    name: str
    """The corpus's name, in its manifest and in the names of metrics."""
    output: Location
    """The directory of the corpus, which all nodes see, or an fsspec URL (s3://bucket/corpus)."""
    seed: int = 0
    """Seed of all random choices: the tokenizer's sample, the order of rows, the noise."""
    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    """The texts to read."""
    bytes_per_shared_unit: NonNegativeInt = 8 * 2**20
    """Maximum size of small files that are read as one unit of work, in bytes; they follow each other by name. 0: each
    file is a unit."""
    bytes_per_unit: PositiveInt = 64 * 2**20
    """Size of the ranges into which a multistream bz2 dump is cut, in bytes."""
    characters_per_part: PositiveInt = 500_000_000
    """Maximum size of a file of documents, in characters read. Later stages work on one file or a group of files up to
    this size."""
    cleaning: CleaningConfig = CleaningConfig()
    """Which pages and lines are dropped for their content."""
    dedup: DedupConfig = DedupConfig()
    """Which duplicates are dropped."""
    decontamination: DecontaminationConfig = DecontaminationConfig()
    """The evaluation sets whose items must not be in the corpus."""
    steps: list[AnyStep] = []
    """The steps on documents in your order, in place of `cleaning`, `dedup` and `decontamination`: names, or keys and
    values. []: the order of these sections."""
    keep_dropped: bool = True
    """Write tables of the dropped documents, `dropped/*.parquet`. They say which step and rule dropped a document,
    and which document stays in its place."""
    split: SplitConfig = SplitConfig()
    """Which documents are held out."""
    tokenizer: AnyTokenizer = SentencePieceConfig()
    """How text becomes tokens."""
    rows: RowsConfig = RowsConfig()
    """How documents become rows, and rows become examples."""
    shards: ShardsConfig = ShardsConfig()
    """The size of the shards."""
    ray: RayConfig = RayConfig()
    """Where the build runs."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        """A file with the list `steps` empties the sections of a file that it extends."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key not in _REPLACED}

    @field_validator("output")
    @classmethod
    def _output_is_a_folder(cls, output: str) -> str:
        scheme, _, key = output.rpartition("://")
        bucket, _, inside = key.partition("/")
        if not scheme and Path(output).resolve() == Path("/"):
            raise ValueError(f"{output} is the root of all files; name a folder of the corpus's own")
        if scheme in stores.OBJECT_STORES and ".." in inside.split("/"):
            raise ValueError(f"{output}: a store takes '..' for a name; write the path without it")
        if scheme in stores.OBJECT_STORES and not inside.strip("/"):
            raise ValueError(f"{output} is a whole bucket; name a folder in it, such as {scheme}://{bucket}/corpus")
        return output

    @field_validator("sources")
    @classmethod
    def _names_are_unique(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"each source needs a different name, got {', '.join(names)}")
        return sources

    @model_validator(mode="before")
    @classmethod
    def _nothing_reads_ids(cls, given: Any) -> Any:
        """Without text, no cleaning and no deduplication of lines are the defaults."""
        if not isinstance(given, dict) or _has_text(given.get("tokenizer")) or given.get("steps"):
            return given
        off: dict[str, Any] = {"cleaning": {"profile": "none"}, "dedup": {"lines": False}}
        given = {**off, **given}
        return given | {key: {**own, **given[key]} for key, own in off.items() if isinstance(given[key], dict)}

    @model_validator(mode="after")
    def _ids_are_no_text(self) -> "CorpusConfig":
        for number, source in enumerate(self.sources):
            if source.has_ids and self.tokenizer.has_text:
                raise ValueError(f"sources.{number}.options.ids: needs tokenizer.kind ids, not {self.tokenizer.kind}")
        if self.tokenizer.has_text:
            return self
        wrong = [f"steps.{step.step}" for step in self.steps if step.step in READS_TEXT]
        if not self.steps:
            cleaning = [self.cleaning, *(source.cleaning for source in self.sources if source.cleaning)]
            off, keys = CleaningConfig(profile="none"), CleaningConfig.model_fields.keys() - {"rules"}  # of packages
            wrong += [
                f"cleaning.{key}" for one in cleaning for key in sorted(keys) if getattr(one, key) != getattr(off, key)
            ]
            wrong += [f"dedup.{step}" for step in ("lines", "spans") if getattr(self.dedup, step)]
        if wrong:
            kind = self.tokenizer.kind
            raise ValueError(f"{', '.join(dict.fromkeys(wrong))}: for text, and tokenizer.kind {kind} has none")
        return self

    @model_validator(mode="after")
    def _steps_are_in_one_place(self) -> "CorpusConfig":
        if not self.steps:
            return self
        sections = {*_REPLACED} & self.model_fields_set - {"dedup"}
        sections |= {f"dedup.{key}" for key in self.dedup.model_fields_set - {"keys_per_bucket"}}
        sections |= {f"sources.{n}.cleaning" for n, source in enumerate(self.sources) if source.cleaning is not None}
        if sections:
            raise ValueError(
                f"steps: the list replaces {', '.join(sorted(sections))}; leave out one of the two, or set it to null"
            )
        names = [step.step for step in self.steps if not isinstance(step, Rule) or step.prepared]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"steps: {', '.join(sorted(twice))} is named twice; only rules may be")
        return self

    @model_validator(mode="after")
    def _rules_name_sources(self) -> "CorpusConfig":
        known = {source.name for source in self.sources}
        rules = {
            "steps": [step for step in self.steps if isinstance(step, Rule)],
            "cleaning.rules": self.cleaning.rules,
        }
        for number, source in enumerate(self.sources):
            rules[f"sources.{number}.cleaning.rules"] = source.cleaning.rules if source.cleaning else []
        for key, of_key in rules.items():
            if unknown := {name for rule in of_key for name in rule.sources} - known:
                raise ValueError(f"{key}: no source {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        return self

    @model_validator(mode="after")
    def _pairs_are_text_to_text(self) -> "CorpusConfig":
        pairs = [source.name for source in self.sources if source.pairs]
        text_to_text = isinstance(self.rows.objective, TextToText)
        if pairs and not text_to_text:
            lost = f"would lose the targets of the pairs in {', '.join(pairs)}"
            raise ValueError(f"rows.objective: {self.rows.objective.name} {lost}")
        if text_to_text and len(pairs) < len(self.sources):
            raise ValueError("rows.objective: text_to_text needs every source to have format pairs")
        return self

    @property
    def pairs(self) -> bool:
        """Whether the documents are text-to-text pairs."""
        return self.sources[0].pairs

    def cleaning_of(self, source: SourceConfig) -> CleaningConfig:
        """The rules for the documents of `source`."""
        if source.cleaning is not None:
            return source.cleaning
        return CleaningConfig(profile="none", rules=self.cleaning.rules) if source.pairs else self.cleaning

    def ratio_of(self, source: SourceConfig) -> tuple[int, int]:
        """(p, q), as in `SplitConfig.ratio`, for the documents of `source`."""
        whole = {"train": (0, 1), "validation": (1, 1)}
        return whole[source.split] if source.split else self.split.ratio

    def steps_of(self, source: SourceConfig) -> list[Step]:
        """The steps on the documents of `source`, in order. The steps that compare documents are the same ones for all
        sources.

        Without the list `steps`, the rules for language, bad words and the classifier follow the last step that
        shortens texts, as in C4. Evaluation sets are looked for last, in what will be the corpus.
        """
        if self.steps:
            chosen = [step for step in self.steps if not isinstance(step, Rule) or step.takes(source.name)]
        else:
            cleaning = self.cleaning_of(source)
            comparing = list(self.dedup.steps(cleaning.min_sentences_per_page))
            at = max((number for number, step in enumerate(comparing, 1) if step.shortens), default=0)
            of_pages = [rule for rule in cleaning.of_pages if rule.takes(source.name)]
            chosen = [*of_pages, *comparing[:at], *cleaning.of_what_is_left, *comparing[at:]]
            if self.decontamination.sets:
                chosen.append(Decontamination(**dict(self.decontamination)))
        return [one for step in chosen for one in step.expanded]

    @property
    def all_steps(self) -> dict[str, list[Step]]:
        """`steps_of` each source, by its name."""
        return {source.name: self.steps_of(source) for source in self.sources}

    @property
    def key_steps(self) -> list[KeyStep]:
        """The steps that compare documents, in order."""
        return [step for step in self.all_steps[self.sources[0].name] if isinstance(step, KeyStep)]

    @property
    def searched_for(self) -> Decontamination | None:
        """The step that looks for evaluation sets; None if there is none."""
        steps = (step for steps in self.all_steps.values() for step in steps)
        return next((step for step in steps if isinstance(step, Decontamination)), None)

    @property
    def tokens_per_shard(self) -> int:
        return self.shards.rows_per_block * self.shards.blocks_per_shard * self.rows.objective.raw_length

    def buckets(self, tokens: int) -> int:
        """Number of buckets, and so of shards, for a split of `tokens` tokens."""
        return max(1, math.ceil(tokens / self.tokens_per_shard))
