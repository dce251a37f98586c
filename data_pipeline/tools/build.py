"""Builds a corpus from Python, as `data-pipeline build` does."""

from typing import Any

from data_pipeline import opened
from data_pipeline.base.config_file import Given, load_with
from data_pipeline.base.processes import handlers_kept
from data_pipeline.config import CorpusConfig
from data_pipeline.stages import pipeline


def build(config: Given, /, *, strict: bool = False, repair: bool = False, **overrides: Any) -> opened.Corpus:
    """Builds the corpus of a corpus file, or what it lacks, and opens it.

    `config`: a path, `configs:NAME` for a file that ships, or a file's keys and values. `overrides`: keys of the file;
    a section is a mapping, which is merged with the file's: `tokenizer={"vocab_size": 8000}`. `strict` and `repair`
    as in the command.

    Raises UserError for a wrong config or a missing input, and FailedError if the build fails.
    """
    settings = load_with(config, overrides, CorpusConfig)
    with handlers_kept():  # Ray sets its own
        return opened.open(pipeline.build(settings, "shards", strict, repair))
