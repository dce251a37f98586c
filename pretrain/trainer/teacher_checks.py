"""Whether a run can have its teacher, and what identifies the teacher. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.corpus import Corpus
from data_pipeline.foundation.atomic import sha256
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.loading.stream import differences
from data_pipeline.objectives import Objective, PrefixLM
from data_pipeline.tokenizer import load as load_tokenizer
from pretrain import models
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.choose import checkpoint_in
from pretrain.config.run_config import DistillationSection, RunConfig
from pretrain.models import DecoderOnlyConfig, ModelConfig

_IDS = ("kind", "sha256", "special_tokens")


def teacher_checkpoint(settings: DistillationSection) -> Path:
    """The checkpoint of the teacher."""
    return checkpoint_in(Path(settings.teacher))


def teacher_config(settings: DistillationSection) -> DecoderOnlyConfig:
    """The teacher's model. Raises UserError if it isn't decoder-only, FailedError if its checkpoint is damaged."""
    config = checkpoint_index.read(teacher_checkpoint(settings)).model
    if not isinstance(config, DecoderOnlyConfig):
        raise UserError(f"{settings.teacher}: a model of the family {config.family}; expected a decoder_only model")
    return config


def identity(settings: DistillationSection | None) -> checkpoint_index.Identity | None:
    """What may not change over the life of a run: all settings but the teacher's path, and the sha256 of its index,
    which has those of its files."""
    if settings is None:
        return None
    index = teacher_checkpoint(settings) / checkpoint_index.INDEX
    return {"teacher_sha256": sha256(index), **settings.model_dump(exclude={"teacher"})}


def problems(config: RunConfig, model: ModelConfig, training: list[Corpus]) -> list[str]:
    """Why the run can't have its teacher, one line for each reason."""
    settings = config.distillation
    if settings is None:
        return []
    found = [*_student_problems(model), *_row_problems(training)]
    try:
        teacher = teacher_config(settings)
        tokenizer = vars(load_tokenizer(teacher_checkpoint(settings)).describe())
    except (UserError, FailedError) as error:
        return [*found, f"distillation.teacher: {error}"]
    if not found:
        texts = [longest_text(corpus.objective) for corpus in training]
        found += _length_problems(settings, teacher, max(texts))
    return found + _tokenizer_problems(settings, tokenizer, training[0])


def longest_text(objective: Objective) -> int:
    """The most tokens of a text that the teacher reads, of rows of prefix LM: the last one predicts nothing."""
    assert isinstance(objective, PrefixLM)
    return (objective.raw_length // 2 if objective.packed else objective.raw_length) - 1


def _student_problems(model: ModelConfig) -> list[str]:
    able = [name for name, family in models.FAMILIES.items() if "prefix_lm" in family.objectives]
    if model.family in able:
        return []
    return [f"distillation: needs an encoder-decoder ({', '.join(able)}), but model.family is {model.family}"]


def _row_problems(training: list[Corpus]) -> list[str]:
    """The teacher reads inputs and targets as one text, which they are in prefix LM alone."""
    needs = "needs rows that are a text cut in two (prefix_lm)"
    return [
        f"distillation: {needs}, but {corpus.directory} has {corpus.objective.name}"
        for corpus in training
        if not isinstance(corpus.objective, PrefixLM)
    ]


def _length_problems(settings: DistillationSection, teacher: DecoderOnlyConfig, longest: int) -> list[str]:
    most = teacher.longest_sequence
    if most is None or longest <= most:
        return []
    return [
        f"distillation.teacher: {settings.teacher}: reads {most} tokens at most, but texts of the rows have {longest}"
    ]


def _tokenizer_problems(settings: DistillationSection, tokenizer: Mapping[str, Any], corpus: Corpus) -> list[str]:
    """Ids must mean the same to both. Sentinels come after all others, and text has none: the teacher may lack them."""
    here = vars(corpus.manifest.tokenizer)
    keys = _IDS if tokenizer["sentinels"] == 0 else (*_IDS, "sentinels")
    found = differences(*({f"tokenizer.{key}": one.get(key) for key in keys} for one in (tokenizer, here)))
    return [f"distillation.teacher: {settings.teacher}: {line}" for line in found]
