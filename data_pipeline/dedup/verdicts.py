"""The verdicts of the language and bad word rules on the documents of one part."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.dedup.step import Row
from data_pipeline.foundation.atomic import atomic_path
from data_pipeline.text.tally import Tally

_SCHEMA = pa.schema([("gone", pa.bool_()), ("rule", pa.string()), ("language", pa.string())])


class Verdicts:
    """A verdict for each document, in order: `gone` (dropped earlier), the `rule` that drops it or "", its language."""

    def __init__(self) -> None:
        self._gone: list[bool] = []
        self._rules: list[str] = []
        self._languages: list[str] = []

    def add(self, *, gone: bool, rule: str, language: str) -> None:
        self._gone.append(gone)
        self._rules.append(rule)
        self._languages.append(language)

    @property
    def gone(self) -> set[int]:
        """The numbers of the documents that earlier steps have dropped."""
        return {number for number, gone in enumerate(self._gone) if gone}

    def without(self, number: int, row: Row, tally: Tally, min_sentences: int) -> str | None:
        """The text of document `number`, whose language is set in `row`; None if it is dropped, which is counted."""
        if rule := self._rules[number]:
            tally.drop(rule, row["url"] if rule == "bad_words" else row["text"])  # the report shows examples
            return None
        row["language"] = self._languages[number]
        return row["text"]

    def write(self, path: Path) -> None:
        table = pa.table([self._gone, self._rules, self._languages], schema=_SCHEMA)
        with atomic_path(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")

    @classmethod
    def read(cls, path: Path) -> "Verdicts":
        verdicts = cls()
        columns = pq.read_table(path).to_pydict()
        verdicts._gone, verdicts._rules, verdicts._languages = (columns[name] for name in _SCHEMA.names)
        return verdicts
