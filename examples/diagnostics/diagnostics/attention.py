"""Draws the attention of a saved model on a text."""

from pathlib import Path

import torch

from data_pipeline.base.atomic import write_together
from data_pipeline.base.errors import UserError
from diagnostics.attention_maps import attention_figure, attention_patterns
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate import record
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import input_ids
from pretrain.models import FAMILIES


def draw_attention(trained: TrainedModel, text: str, target: str | None, most: int, out: Path) -> list[Path]:
    """Draws the attention of `trained` on a text and its target. Returns the images, which are below `out`.

    `target`: None: the model's answer. A causal model reads only the text. Raises UserError for a text or a target that
    is longer than the model's positions.
    """
    family, tokenizer = FAMILIES[trained.model.config.family], trained.tokenizer
    inputs = torch.tensor([input_ids(trained, text)], device=trained.device)
    labels = inputs
    if family.generates == "answers":
        answer = tokenizer.encode_with_sentinels(target) if target is not None else None
        labels = torch.tensor([answer]) if answer else generate(trained.model, inputs, None, GenerationSettings())
    elif target is not None:
        raise UserError(f"--target: models of the family {trained.model.config.family} read one text")
    longest = trained.model.config.longest_sequence
    for name, ids in (("TEXT", inputs), ("the target", labels)):
        if longest is not None and ids.size(1) > longest:
            raise UserError(f"{name}: has {ids.size(1)} tokens, but the model takes {longest} at most")
    with torch.no_grad():
        row = {"encoder_input_ids": inputs, "labels": labels}
        patterns = attention_patterns(trained.model, row, tokenizer, most)
    images = {out / f"{kind}.png": attention_figure(pattern, kind) for kind, pattern in patterns.items()}
    write_together({path: record.png(figure) for path, figure in images.items()})
    return list(images)
