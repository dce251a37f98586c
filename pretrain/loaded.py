"""A trained model as Python code uses it: a torch module with losses and generation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from data_pipeline.base import arguments
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain import export, models
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.allowed import AllowedOutputs
from pretrain.evaluate.generation.output_file import read_answers, write_answers
from pretrain.evaluate.generation.settings import GenerationSettings, checked
from pretrain.evaluate.generation.texts import Answer, Answers, first_ids
from pretrain.export.card import Lineage
from pretrain.export.load import CONFIG
from pretrain.hardware import tell_of_spinning
from pretrain.models.layers import SkipInit
from pretrain.models.model import Losses


class PretrainedModel(nn.Module):
    """A model with its tokenizer.

    Attributes:
        model: the network itself; `model.config` has its settings.
        tokenizer: the Tokenizer that it was trained with.
        objective: the name of the objective that it was trained on, which decides what its inputs begin and end with;
            None: unknown.
    """

    def __init__(self, trained: TrainedModel):
        super().__init__()
        self.model, self.tokenizer, self.objective = trained.model, trained.tokenizer, trained.objective

    def forward(self, **batch: Tensor) -> Losses:
        """The loss of each label, fp32, by the name of the labels: "labels" (batch, targets), 0 where a label is -100.

        `batch` has the tensors of docs/reference/batches.md, as loaders give them, on the model's device. The loss of a
        step is the sum of `losses[name].sum() / (batch[name] != -100).sum()`.
        """
        losses: Losses = self.model(**batch)
        return losses

    def __repr__(self) -> str:
        weights = list(self.model.parameters())
        parameters = sum(one.numel() for one in weights)
        described = f"{parameters:,} parameters, {str(weights[0].dtype).removeprefix('torch.')} on {weights[0].device}"
        return f"PretrainedModel({self.model.config.family}: {described}; {self.tokenizer!r})"

    def generate(
        self,
        texts: str | Sequence[str],
        *,
        samples: int | None = None,
        allowed: str | Path | Sequence[str | Sequence[int]] | None = None,
        output: str | Path | None = None,
        batch_size: int | None = None,
        **settings: Any,
    ) -> list[Answer]:
        """The answers to `texts`, or their continuations if the model is causal, in the order of `texts`.

        A str is one text. `<extra_id_0>`, `<extra_id_1>`, … in a text stand for masked spans. `samples`: number of
        samples of each text; the default temperature is then 1. `allowed`: the only answers, as texts or lists of ids,
        or the path of a file with one in each line. `output`: a JSONL file for the answers; the same call resumes where
        the file ends. `batch_size`: texts per batch; None: by their length. `settings` have transformers' names and
        meanings: max_new_tokens, num_beams, num_return_sequences, temperature, top_k, top_p, seed, …; the default is
        greedy decoding. Raises UserError for a wrong setting, anything but texts, a text that is too long, an `output`
        of another call, and a model that doesn't generate.
        """
        samples = None if samples is None else arguments.integer("samples", samples, 1)
        batch_size = None if batch_size is None else arguments.integer("batch_size", batch_size, 1)
        checked_settings, prompts = checked(settings, samples), arguments.texts(texts)
        tell_of_spinning()
        training = self.training
        self.eval()
        try:
            trained = TrainedModel(self.model, self.tokenizer, self.objective)
            answers = answers_of(trained, prompts, checked_settings, batch_size, samples, allowed)
            if output is None:
                return list(answers.following(0))
            path = arguments.local_path(output)
            write_answers(path, answers)
            return read_answers(path, answers)
        finally:
            self.train(training)

    def export(self, directory: str | Path, /) -> None:
        """Writes the model and its tokenizer to `directory` for transformers' `from_pretrained`, and for `load`.

        The model is whole in this process: neither sharded nor wrapped. `directory` must be new or empty. Raises
        UserError if it isn't, and for a model that transformers lacks.
        """
        state = {name: one.float().cpu() for name, one in self.model.state_dict().items()}
        of_objective = Lineage(objective=self.objective)
        path = arguments.local_path(directory)
        export.export(state, self.model.config, self.tokenizer, path, lineage=of_objective)


def answers_of(
    trained: TrainedModel,
    texts: Sequence[str],
    settings: GenerationSettings,
    batch_size: int | None,
    samples: int | None,
    allowed: str | Path | Sequence[str | Sequence[int]] | None,
) -> Answers:
    """The answers that `PretrainedModel.generate` returns."""
    tokenizer, outputs = trained.tokenizer, None
    begin = first_ids(tokenizer.vocabulary, models.FAMILIES[trained.model.config.family], trained.objective)
    if isinstance(allowed, str | Path):
        outputs = AllowedOutputs.read(arguments.local_path(allowed), tokenizer, begin)
    elif allowed is not None:
        outputs = AllowedOutputs(allowed, tokenizer, begin)
    return Answers(trained, texts, settings, batch_size, samples, outputs)


def load(path: str | Path, /) -> tuple[PretrainedModel, Tokenizer]:
    """The model, in fp32 on the CPU and in evaluation mode, and its tokenizer.

    `path`: a run's directory (its latest checkpoint), a checkpoint, or a directory that transformers saved. Raises
    UserError if `path` is none of these or the model isn't supported, FailedError if a file is damaged.
    """
    trained = open_model(arguments.local_path(path))
    return PretrainedModel(trained), trained.tokenizer


def open_model(path: Path) -> TrainedModel:
    """The model at `path`, as `load` reads it, with its tokenizer."""
    if not (path / CONFIG).exists():
        return TrainedModel.open(checkpoint_in(path))
    config, state, tokenizer = export.read(path)
    with SkipInit():
        model = models.build(config)
    model.load_state_dict(state)
    return TrainedModel(model.eval(), tokenizer)
