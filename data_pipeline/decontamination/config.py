"""Settings of decontamination in a corpus file."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from data_pipeline.foundation.config_file import Locations, Section


class EvaluationSet(Section):
    """An evaluation set, whose items must not be in the corpus."""

    name: str = Field(min_length=1)
    """The set's name in the report."""
    path: Locations
    """Its files, plain or compressed: a path, a glob, or a list of them, local or as fsspec URLs."""
    format: Literal["jsonl", "tsv", "text"] = "jsonl"
    """How a file holds items. `jsonl`: an object a line. `tsv`: tab-separated columns. `text`: the line itself."""
    fields: list[str | int] = []
    """Where an item's texts are; each is looked for by itself. jsonl: keys (`choices.text`: the key `text` of the
    object, or of each object of the list, under `choices`). tsv: names in the first line or, if there is no such line,
    numbers of columns from 1. text: none."""

    @model_validator(mode="after")
    def _fields_suit_the_format(self) -> "EvaluationSet":
        numbers = [field for field in self.fields if isinstance(field, int)]
        if self.format == "text" and self.fields:
            raise ValueError("fields: format text has none, since its lines are the items")
        if self.format != "text" and not self.fields:
            raise ValueError(f"fields: format {self.format} needs the names of the fields that hold an item's texts")
        if numbers and (self.format != "tsv" or len(numbers) < len(self.fields) or min(numbers) < 1):
            raise ValueError("fields: expected names, or for tsv without a line of names only numbers from 1")
        return self


class DecontaminationConfig(Section):
    """Drops each document that contains an item of an evaluation set: a run of its words, whatever their case and the
    punctuation between them. In scripts without spaces, as many letters count as the words have on average."""

    sets: list[EvaluationSet] = []
    """The evaluation sets. [] turns decontamination off."""
    ngram: int = Field(13, ge=2)
    """How many successive words of an item must be in a document. GPT-3: 13."""
    shortest: int = Field(8, ge=1)
    """Shorter texts of items aren't looked for; those of fewer words than `ngram` must be in a document as a whole.
    GPT-3: 8."""

    @field_validator("sets")
    @classmethod
    def _names_are_unique(cls, sets: list[EvaluationSet]) -> list[EvaluationSet]:
        names = [one.name for one in sets]
        if len(set(names)) < len(names):
            raise ValueError(f"each set needs a different name, got {', '.join(names)}")
        return sets

    @model_validator(mode="after")
    def _shortest_is_no_longer_than_an_ngram(self) -> "DecontaminationConfig":
        if self.shortest > self.ngram:
            raise ValueError(f"shortest: {self.shortest} is more than ngram, {self.ngram}")
        return self
