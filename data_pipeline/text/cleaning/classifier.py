"""Scores of pages by a fastText classifier (Joulin et al. 2017), and the rule that keeps the pages of a label.

fasttext-predict is fastText's own C++ without training: wheels of 0.3 MB without dependencies. (The package `fasttext`
has no wheels, and its `predict` fails with NumPy 2.) Some damaged files make the library end the process, and some are
loaded as if they were whole. So this module checks a file before the library loads it.
"""

import functools
import mmap
import os
import struct
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Literal

import fasttext
from pydantic import Field

from data_pipeline.base.atomic import sha256
from data_pipeline.base.config_file import LocalPath, Section
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import first_few
from data_pipeline.text.document import Document, Dropped, Tally
from data_pipeline.text.step import Rule

Scorer = Callable[[str], float]
_PREFIX = "__label__"
_MAGIC, _SUPERVISED = 793_712_314, 3
_HEADER = struct.Struct("<2i12id3i2q")  # magic, version; 12 settings and one more; words, labels, tokens, pruned
_COUNT_AND_TYPE, _FLAG, _SHAPE, _NUMBER, _QUANTISER = map(struct.Struct, ("<qb", "<?", "<2q", "<i", "<4i"))
_LABEL = 1  # the type of a label among the dictionary's entries
_CENTROIDS = 256  # of each part of a quantised vector
_MEMORY = 2  # bytes of a loaded model for each byte of its file: 1 for vectors, more for words


class ClassifierConfig(Section):
    """Keeps the pages to which a fastText classifier gives a label with a probability of `threshold` or more."""

    path: LocalPath
    """A supervised fastText model, .bin or .ftz, on a disk that all nodes see. Each worker has it in memory."""
    label: str = Field(min_length=1)
    """The label of the pages to keep, with or without `__label__`."""
    threshold: float = Field(0.5, ge=0, le=1)
    """Minimum probability of the label."""


class Classifier(ClassifierConfig, Rule):
    """Drops the pages to which a fastText classifier doesn't give the label."""

    step: Literal["classifier"] = "classifier"

    @cached_property
    def _score(self) -> Scorer:
        return scorer(self)

    @property
    def memory(self) -> int:
        return _MEMORY * Path(self.path).stat().st_size

    @property
    def contents(self) -> list[str]:
        return [content_of(self)]

    def described(self) -> dict[str, object]:
        return {**self.model_dump(), "path": content_of(self)}

    def check(self) -> None:
        label_of(self)

    def apply(self, document: Document, tally: Tally) -> Document | Dropped:
        return document if self._score(document.text) >= self.threshold else Dropped("classifier", document.text)


def scorer(config: ClassifierConfig) -> Scorer:
    """A function from a text to the probability of the label, 0 to 1. The whole page is one line for fastText.

    Raises UserError if the file can't be read, isn't a whole classifier or lacks the label.
    """
    label = label_of(config)
    predict = _loaded(config.path)

    def score(text: str) -> float:
        found = predict(text.replace("\n", " ").encode("utf-8", "replace").decode())
        return min(1.0, round(found.get(label, 0.0), 4))  # fastText's sums exceed 1 by some 1e-5

    return score


def label_of(config: ClassifierConfig) -> str:
    """The label as the model spells it. Raises what `scorer` raises, without loading the model."""
    try:
        labels = _labels(*_version(config.path))
    except ValueError as error:
        raise UserError(f"cleaning.classifier.path: {config.path}: no fastText classifier: {error}") from None
    for label in (config.label, _PREFIX + config.label):
        if label in labels:
            return label
    known = first_few((label.removeprefix(_PREFIX) for label in labels), 10)
    raise UserError(f"cleaning.classifier.label: {config.path} has no label {config.label!r}; it has {known}")


def content_of(config: ClassifierConfig) -> str:
    """The sha256 of the model file. Raises UserError if it can't be read."""
    return _sha256(*_version(config.path))


def _version(path: str) -> tuple[str, int]:
    """The file's version, by which results are cached. Raises UserError if the file can't be read."""
    try:
        with Path(path).open("rb") as file:
            return path, os.fstat(file.fileno()).st_mtime_ns
    except OSError as error:
        raise UserError(f"cleaning.classifier.path: {path}: can't be read: {error.strerror}") from None


@functools.lru_cache
def _sha256(path: str, modified: int) -> str:
    return sha256(Path(path))


def _loaded(path: str) -> Callable[[str], dict[str, float]]:
    """A function from a line to the probability of each label."""
    model = fasttext.load_model(path)

    def predict(line: str) -> dict[str, float]:
        labels, probabilities = model.predict(line, k=-1)
        return dict(zip(labels, probabilities, strict=True))

    return predict


@functools.lru_cache
def _labels(path: str, modified: int) -> list[str]:
    """The labels of a model file. Raises ValueError if the file isn't a supervised model or isn't whole."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        model = _Model(content)
        magic, _, dimensions, *settings = model.read(_HEADER)
        kind, buckets = settings[6], settings[7]
        entries, words, labels, _, pruned = settings[-5:]
        if magic != _MAGIC:
            raise ValueError("its first bytes are those of another format")
        if kind != _SUPERVISED:
            raise ValueError("it has word vectors, but no labels")
        if min(dimensions, words, labels, buckets) < 0 or words + labels != entries:
            raise ValueError("it is damaged")
        names = [model.entry() for _ in range(entries)]
        model.at += 8 * max(0, pruned)
        inputs, outputs = model.matrix(dimensions), model.matrix(dimensions)
        if inputs != words + (buckets if pruned < 0 else pruned) or outputs != labels or model.at != len(content):
            raise ValueError("it is damaged or not whole")
    return [name.decode("utf-8", "replace") for name, kind in names if kind == _LABEL]


class _Model:
    """Reads a file that fastText has written, from byte `at` on. Raises ValueError if the file ends too soon."""

    def __init__(self, content: mmap.mmap):
        self._content = content
        self.at = 0

    def read(self, form: struct.Struct) -> tuple:
        if self.at + form.size > len(self._content):
            raise ValueError("it ends too soon")
        self.at += form.size
        return form.unpack_from(self._content, self.at - form.size)

    def entry(self) -> tuple[bytes, int]:
        """The name and the type of the next entry of the dictionary."""
        start, end = self.at, self._content.find(b"\0", self.at)
        if end < 0:
            raise ValueError("it ends too soon")
        self.at = end + 1
        _, kind = self.read(_COUNT_AND_TYPE)
        return self._content[start:end], kind

    def matrix(self, dimensions: int) -> int:
        """Skips the next matrix, plain or quantised, and returns its number of rows."""
        (quantised,) = self.read(_FLAG)
        (with_norms,) = self.read(_FLAG) if quantised else (False,)
        rows, columns = self.read(_SHAPE)
        if rows < 0 or columns != dimensions:
            raise ValueError("it is damaged")
        if not quantised:
            self.at += 4 * rows * columns
            return rows
        (codes,) = self.read(_NUMBER)
        self._pass_codes(codes)
        if with_norms:
            self._pass_codes(rows)
        return rows

    def _pass_codes(self, codes: int) -> None:
        self.at += max(0, codes)
        dimensions, *_ = self.read(_QUANTISER)
        self.at += 4 * _CENTROIDS * max(0, dimensions)
