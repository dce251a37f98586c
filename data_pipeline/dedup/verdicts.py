"""The verdicts of the language and bad word rules on the documents of one part."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.foundation.atomic import atomic_path
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally

_SCHEMA = pa.schema([("dropped", pa.bool_()), ("rule", pa.string()), ("language", pa.string())])


class Verdicts:
    """For each document: whether an earlier step `dropped` it, the `rule` that drops it or "", the language."""

    def __init__(self) -> None:
        self._dropped: list[bool] = []
        self._rules: list[str] = []
        self._languages: list[str] = []

    def add(self, *, dropped: bool, rule: str, language: str) -> None:
        self._dropped.append(dropped)
        self._rules.append(rule)
        self._languages.append(language)

    @property
    def dropped(self) -> set[int]:
        """The numbers of the documents that earlier steps have dropped."""
        return {number for number, dropped in enumerate(self._dropped) if dropped}

    def without(self, number: int, document: Document, tally: Tally, min_sentences: int) -> Document | None:
        """Document `number` with its language; None if it is dropped, which is counted."""
        if rule := self._rules[number]:
            tally.drop(rule, document.url if rule == "bad_words" else document.text)  # the report shows examples
            return None
        return replace(document, language=self._languages[number])

    def write(self, path: Path) -> None:
        table = pa.table([self._dropped, self._rules, self._languages], schema=_SCHEMA)
        with atomic_path(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")

    @classmethod
    def read(cls, path: Path) -> "Verdicts":
        verdicts = cls()
        columns = pq.read_table(path).to_pydict()
        verdicts._dropped, verdicts._rules, verdicts._languages = (columns[name] for name in _SCHEMA.names)
        return verdicts
