"""The settings of a corpus file (YAML)."""

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.dedup.config import DedupConfig
from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import LocalPath, Section
from data_pipeline.objectives import AnyObjective, SpanCorruption, TextToText
from data_pipeline.sources import OPTIONS


class SourceConfig(Section):
    """Files of one format. `path` is a path, a glob or a list of them, local or an fsspec URL.

    `name` is part of every document's id; it defaults to the format. `language` is for documents that don't state
    theirs. `options` are the format's. `cleaning` replaces the corpus's rules; pairs are cleaned only if their source
    has rules of its own.
    """

    format: Literal["wet", "warc", "c4", "wikipedia", "wikiextractor", "jsonl", "text", "parquet", "pairs"]
    path: str | list[str]
    name: str = ""
    language: str = ""
    options: dict[str, Any] = {}
    cleaning: CleaningConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_defaults_to_format(cls, values: dict) -> dict:
        if isinstance(values, dict) and not values.get("name"):
            values = {**values, "name": values.get("format", "")}
        return values

    @field_validator("path")
    @classmethod
    def _home_is_expanded(cls, path: str | list[str]) -> str | list[str]:
        return paths.location(path) if isinstance(path, str) else [paths.location(one) for one in path]

    @field_validator("name")
    @classmethod
    def _name_is_one_path_part(cls, name: str) -> str:
        if "/" in name:
            raise ValueError("a source's name can't contain '/'")
        return name

    @model_validator(mode="after")
    def _options_are_the_formats(self) -> "SourceConfig":
        try:
            OPTIONS[self.format].model_validate(self.options)
        except ValidationError as error:
            known = ", ".join(OPTIONS[self.format].model_fields) or "none"
            problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg'].lower()}" for p in error.errors())
            raise ValueError(f"options: {problems} (format {self.format} has: {known})") from None
        return self


class SplitConfig(Section):
    """Which documents are held out, chosen by the md5 of the normalised URL or, without a URL, of the id."""

    validation_fraction: float = Field(0.001, ge=0, lt=1)

    @property
    def ratio(self) -> tuple[int, int]:
        """(p, q): a document is held out if md5 mod q < p. 0.001 gives TFDS's rule, md5 mod 1000 == 0."""
        fraction = Fraction(str(self.validation_fraction)).limit_denominator(1_000_000)
        return fraction.numerator, fraction.denominator


class TokenizerConfig(Section):
    """A sentencepiece unigram model, either trained on the corpus or read from a file; or an existing byte-level BPE.

    `path` is the sentencepiece file, or the directory of the byte-level BPE, which holds encoder.json and vocab.bpe, or
    vocab.json and merges.txt. `dictionary` is fairseq's, which maps GPT-2's ids to BART's; by default dict.txt in that
    directory, if there is one. `special_tokens` get ids between the pieces and the sentinels and never match text:
    <mask>, <s>, [R]. `sample_documents` and `sample_bytes` limit the training sample, which is the first training
    documents in the order of a hash.
    """

    kind: Literal["sentencepiece", "byte_level_bpe"] = "sentencepiece"
    path: LocalPath | None = Field(None, validate_default=True)
    dictionary: LocalPath | None = None
    vocab_size: PositiveInt = 32_000  # pieces; special tokens and sentinels come on top
    special_tokens: list[str] = []
    sentinels: NonNegativeInt = 100
    sample_documents: PositiveInt = 1_000_000
    sample_bytes: PositiveInt = 100_000_000  # of UTF-8 text; the trainer takes up to 23 bytes of memory for each
    character_coverage: float = Field(0.9995, gt=0, le=1)
    byte_fallback: bool = False

    @field_validator("path")
    @classmethod
    def _only_sentencepiece_is_trained(cls, path: str | None, others: ValidationInfo) -> str | None:
        if path is None and others.data.get("kind") == "byte_level_bpe":
            raise ValueError(
                "kind byte_level_bpe needs the directory of an existing tokenizer; only sentencepiece can be trained"
            )
        return path

    @field_validator("dictionary")
    @classmethod
    def _a_dictionary_renumbers_byte_level_bpe(cls, dictionary: str | None, others: ValidationInfo) -> str | None:
        if dictionary is not None and others.data.get("kind") == "sentencepiece":
            raise ValueError("only kind byte_level_bpe takes a dictionary; found kind sentencepiece")
        return dictionary

    @field_validator("special_tokens")
    @classmethod
    def _names_are_distinct(cls, names: list[str]) -> list[str]:
        for number, name in enumerate(names):
            if not name or any(character.isspace() for character in name):
                raise ValueError(f"a name is empty or has white space: {name!r}")
            if name.startswith("<extra_id_"):
                raise ValueError(f"{name} is a sentinel's name; set the number of sentinels with tokenizer.sentinels")
            if name in names[:number]:
                raise ValueError(f"{name} is listed twice")
        return names

    @property
    def layout(self) -> dict[str, Any]:
        """The settings that loading a tokenizer needs besides its files."""
        return self.model_dump(include={"kind", "special_tokens", "sentinels"})


_SUITABLE = {"text_to_text": ("complete_documents", "examples"), "ul2": ("concatenate",)}  # packings of objectives


class RowsConfig(Section):
    """How documents become rows, and rows become examples.

    `apply_at` chooses whether noise is applied when rows are loaded or when shards are built. `end_of_document` puts an
    end mark after each document, for models that generate whole documents.
    """

    packing: Literal["concatenate", "complete_documents", "sentence_pairs", "examples"] = "concatenate"
    end_of_document: bool = False
    objective: AnyObjective = SpanCorruption()
    apply_at: Literal["load", "build"] = "load"

    @model_validator(mode="after")
    def _packing_suits_the_objective(self) -> "RowsConfig":
        suitable = _SUITABLE.get(self.objective.name, ("concatenate", "complete_documents"))
        if "second_start" in self.objective.columns:
            suitable = ("sentence_pairs",)
        if self.packing not in suitable:
            raise ValueError(f"packing: {self.objective.name} needs {' or '.join(suitable)}, not {self.packing}")
        if self.packing == "examples" and self.apply_at == "load":
            raise ValueError("apply_at: packed examples are made when shards are built; set it to build, not load")
        return self


class ShardsConfig(Section):
    rows_per_block: PositiveInt = 1024
    blocks_per_shard: PositiveInt = 64


class RayConfig(Section):
    """`address` is an existing cluster; null starts one inside the command, with `num_cpus` CPUs (null: all)."""

    address: str | None = None
    num_cpus: PositiveInt | None = None


class CorpusConfig(Section):
    name: str
    output: LocalPath
    seed: int = 0
    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    bytes_per_unit: PositiveInt = 64 * 2**20  # a multistream bz2 dump is cut into ranges of about this size
    characters_per_part: PositiveInt = 500_000_000  # read for one file of documents, the unit of later stages
    cleaning: CleaningConfig = CleaningConfig()
    dedup: DedupConfig = DedupConfig()
    split: SplitConfig = SplitConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    rows: RowsConfig = RowsConfig()
    shards: ShardsConfig = ShardsConfig()
    ray: RayConfig = RayConfig()

    @field_validator("sources")
    @classmethod
    def _names_are_unique(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"each source needs a different name, got {', '.join(names)}")
        return sources

    @model_validator(mode="after")
    def _pairs_are_text_to_text(self) -> "CorpusConfig":
        pairs = [source.name for source in self.sources if source.format == "pairs"]
        text_to_text = isinstance(self.rows.objective, TextToText)
        if pairs and not text_to_text:
            raise ValueError(
                f"rows.objective: {self.rows.objective.name} would lose the targets of the pairs in {', '.join(pairs)}"
            )
        if text_to_text and len(pairs) < len(self.sources):
            raise ValueError("rows.objective: text_to_text needs every source to have format pairs")
        return self

    @property
    def pairs(self) -> bool:
        """Whether the documents are text-to-text pairs."""
        return self.sources[0].format == "pairs"

    def cleaning_of(self, source: SourceConfig) -> CleaningConfig:
        """The rules for the documents of `source`."""
        if source.cleaning is not None:
            return source.cleaning
        return CleaningConfig(profile="none") if source.format == "pairs" else self.cleaning

    @property
    def steps(self) -> list[str]:
        """Steps of deduplication. "filters", which checks language and bad words, follows the last step that changes
        the text of pages."""
        steps = self.dedup.steps
        behind = [number for number, step in enumerate(steps, 1) if step in ("lines", "spans")]
        if behind and any(self.cleaning_of(source).filters_pages for source in self.sources):
            steps.insert(behind[-1], "filters")
        return steps

    @property
    def tokens_per_shard(self) -> int:
        return self.shards.rows_per_block * self.shards.blocks_per_shard * self.rows.objective.raw_length

    def buckets(self, tokens: int) -> int:
        """Number of buckets, one shard each, for a split of `tokens` tokens."""
        return max(1, math.ceil(tokens / self.tokens_per_shard))
