"""A trained model as Python code uses it: a torch module with losses and generation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from data_pipeline.base import arguments, paths
from data_pipeline.base.config_file import check
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain import export, models
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import Answer, answer_texts
from pretrain.export.load import CONFIG
from pretrain.hardware import tell_of_spinning
from pretrain.models.layers import SkipInit
from pretrain.models.model import Losses


class PretrainedModel(nn.Module):
    """A model with its tokenizer.

    Attributes:
        model: the network itself; `model.config` has its settings.
        tokenizer: the Tokenizer that it was trained with.
    """

    def __init__(self, trained: TrainedModel):
        super().__init__()
        self.model, self.tokenizer = trained.model, trained.tokenizer

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

    def generate(self, texts: str | Sequence[str], *, batch_size: int = 16, **settings: Any) -> list[Answer]:
        """The answer to each of `texts`, or its continuation if the model is causal; `batch_size` texts at a time.

        A str is one text. `<extra_id_0>`, `<extra_id_1>`, … in a text stand for masked spans. `settings` have
        transformers' names and meanings: max_new_tokens, num_beams, temperature, top_k, top_p, seed, …; the default is
        greedy decoding. Raises UserError for a wrong setting, anything but texts, a text that is too long, and a model
        that doesn't generate.
        """
        checked, prompts = check(settings, GenerationSettings, "generate"), arguments.texts(texts)
        batch_size = arguments.integer("batch_size", batch_size, 1)
        tell_of_spinning()
        training = self.training
        self.eval()
        try:
            return list(answer_texts(TrainedModel(self.model, self.tokenizer), prompts, checked, batch_size))
        finally:
            self.train(training)


def load(path: str | Path, /) -> tuple[PretrainedModel, Tokenizer]:
    """The model, in fp32 on the CPU and in evaluation mode, and its tokenizer.

    `path`: a run's directory (its latest checkpoint), a checkpoint, or a directory that transformers saved. Raises
    UserError if `path` is none of these or the model isn't supported, FailedError if a file is damaged.
    """
    try:
        given = Path(paths.local(str(path)))
    except ValueError as error:
        raise UserError(str(error)) from None
    trained = open_model(given)
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
