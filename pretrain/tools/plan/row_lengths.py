"""The rows of a run, and the vocabulary of its model, also where its corpus isn't at hand."""

import math
from pathlib import Path

from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.corpus_file import corpus_file_of
from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.objectives.objective import Objective
from data_pipeline.stages.tokenizer import expected
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.models import EncoderOnlyConfig
from pretrain.tools.plan.activations import Rows
from pretrain.trainer.validate import with_tokenizer_ids

_MASKED = 0.15  # the share of tokens that BERT predicts


def resolve_rows(
    config: RunConfig, path: Path, inputs: int | None, targets: int | None
) -> tuple[RunConfig, Rows, str | None]:
    """`config` with the vocabulary of its model, one of its rows at full length, and the corpus file they are from, if
    they are from one.

    Lengths come from the options `inputs` and `targets`, else from the run file's objective, else from its first corpus
    if that is a local directory, else from the corpus file that builds it. Raises UserError for what none of them says.
    """
    directory = Path(config.data.train[0].corpus)
    corpus = open_corpus(str(directory)) if directory.is_dir() else None
    source = None if corpus else corpus_file_of(directory, [path.parent])
    planned = load(paths.config(source), [], CorpusConfig) if source else None
    of_corpus = corpus.objective if corpus else planned.rows.objective if planned else None
    objective: Objective | None = config.data.objective or of_corpus
    problems: list[str] = []
    model, taken = config.model, None
    if corpus is not None:
        model, problems = with_tokenizer_ids(model, corpus)
    elif model.vocab_size is None and planned is not None and planned.tokenizer.path is None:
        model, taken = model.model_copy(update={"vocab_size": expected(planned.tokenizer).size}), source
    elif model.vocab_size is None:
        problems.append(f"model.vocab_size: not set, and {directory} isn't there to take it from; set it")
    if source and config.data.objective is None and not (inputs and targets):
        taken = source
    longest = objective.shape if objective else (None, None)
    inputs = inputs or longest[0]
    targets = targets or longest[1]
    if "span_corruption" not in models.FAMILIES[model.family].objectives:
        targets = inputs
    if inputs is None or targets is None:
        problems.append(
            f"data.objective: not set, and {directory} isn't there to take it from; "
            "give --inputs and --targets, the tokens of a row (T5's are 512 and 114)"
        )
    elif model.longest_sequence is not None and max(inputs, targets) > model.longest_sequence:
        problems.append(f"model: takes sequences of {model.longest_sequence} tokens at most, got {inputs}, {targets}")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    assert inputs is not None
    assert targets is not None
    share = getattr(objective, "mask_ratio", _MASKED) if isinstance(model, EncoderOnlyConfig) else 1
    return config.model_copy(update={"model": model}), Rows(1, inputs, targets, math.ceil(share * targets)), taken
