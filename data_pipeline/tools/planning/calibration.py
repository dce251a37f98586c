"""Measures this machine: builds a small corpus from the first bytes of each source, with the stages of a real build."""

import contextlib
import io
import tempfile
from pathlib import Path

import fsspec
import pyarrow.parquet as pq

from data_pipeline import report
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.execution.inputs import InputFile, list_files
from data_pipeline.execution.workers import without_ray
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.paths import opening
from data_pipeline.pipeline import build

SAMPLE_BYTES = 4_000_000  # of the input of each source, as it is stored
PIECES = 1000  # a larger vocabulary needs more text than the sample has
_WARMING_BYTES = 1_000_000  # the first pages pay for imports; bz2 yields nothing of less than a block


def calibrate(config: CorpusConfig, sample_bytes: int = SAMPLE_BYTES) -> report.Report:
    """The report of a corpus built in this process from the first `sample_bytes` of each source's largest files."""
    with tempfile.TemporaryDirectory() as folder:
        for size in (min(_WARMING_BYTES, sample_bytes), sample_bytes):
            found = _built(config, Path(folder) / str(size), size)
    return found


def _built(config: CorpusConfig, folder: Path, size: int) -> report.Report:
    folder.mkdir(exist_ok=True)
    sources = [
        _sampled(source, folder / "sources" / source.name, size, Path(config.output)) for source in config.sources
    ]
    tokenizer = config.tokenizer
    for pieces in (PIECES, PIECES // 4):  # fewer if there is hardly any text
        if config.tokenizer.path is None:
            changes = {"vocab_size": min(pieces, config.tokenizer.vocab_size), "sample_bytes": 1_000_000}
            tokenizer = config.tokenizer.model_copy(update=changes)
        changed = {"sources": sources, "output": str(folder / "corpus"), "tokenizer": tokenizer}
        shown = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        try:
            with shown[0], shown[1], without_ray():
                return report.read(build(config.model_copy(update=changed)))
        except UserError as error:
            if "tokenizer.vocab_size" not in str(error) or pieces < PIECES:
                raise UserError(f"the calibration failed: {error}") from None
    raise AssertionError("one of the two attempts returns or raises")


def _sampled(source: SourceConfig, folder: Path, size: int, output: Path) -> SourceConfig:
    """`source` with the first bytes of its largest files in its place. A file cut short is read up to the cut."""
    for file in sorted(list_files(source, output=output), key=lambda one: -one.bytes):
        sample = folder / file.name
        sample.parent.mkdir(parents=True, exist_ok=True)
        with opening(file.path):
            if source.format == "parquet":  # it can't be read without its end
                _write_rows(file, sample, size)
            else:
                with fsspec.open(file.path, "rb") as whole:
                    sample.write_bytes(whole.read(size))
        size -= file.bytes
        if size <= 0:
            break
    return source.model_copy(update={"path": str(folder)})


def _write_rows(file: InputFile, sample: Path, size: int) -> None:
    """Writes the first rows of a Parquet file, about `size` bytes of them as they are stored."""
    with fsspec.open(file.path, "rb") as whole:
        parquet = pq.ParquetFile(whole)
        rows = max(1, parquet.metadata.num_rows * min(size, file.bytes) // max(1, file.bytes))
        with pq.ParquetWriter(sample, parquet.schema_arrow) as writer:
            for batch in parquet.iter_batches(1024):
                writer.write_batch(batch.slice(0, rows))
                rows -= len(batch)
                if rows <= 0:
                    return
