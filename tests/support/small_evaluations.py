"""Small models under evaluation without a run, and the log-probabilities that they should give."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data_pipeline.corpus import Corpus
from data_pipeline.corpus.objectives.denoising import Denoising
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.hook import Collectives, Evaluation, ValidationData
from pretrain.models import build, parse
from pretrain.tools import evaluate as command

SIZES = {"d_model": 16, "d_ff": 32, "num_heads": 2, "dropout_rate": 0.0}
T5 = {"family": "t5", **SIZES, "d_kv": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
CAUSAL = {"family": "decoder_only", **SIZES, "num_layers": 1, "max_positions": 64}
BERT = {"family": "encoder_only", **SIZES, "num_layers": 1}
BART = {"family": "bart", **SIZES, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_positions": 64}


def held_out_after(objective: str | None, small: Corpus) -> dict[str, Corpus]:
    """The held-out corpora of a run on `objective`, made of `small`; None: no corpus."""
    if objective == "denoising":
        return {"small": small.with_objective(Denoising())}
    return {"small": small, "swap": small.with_objective(TextToText())} if objective == "text_to_text" else {}


def evaluated_alone(model: Any, tokenizer: Tokenizer, corpora: Mapping[str, Corpus], batch_size: int) -> Evaluation:
    """An evaluation on this rank alone, at step 0."""
    held_out = ValidationData(corpora, tokenizer, False, BatchLayout(0, 1, batch_size, 1))
    return Evaluation(model, held_out, 0, Collectives(None, torch.device("cpu"), alone=True))


def evaluation_of(
    settings: Mapping[str, Any], tokenizer: Tokenizer, corpora: Mapping[str, Corpus] | None = None, batch_size: int = 4
) -> tuple[Any, Evaluation]:
    """A model with the ids of `tokenizer`, and its evaluation."""
    vocabulary = tokenizer.vocabulary
    ids = {"pad_id": vocabulary.pad, "eos_id": vocabulary.eos}
    torch.manual_seed(1)
    model = build(parse({**settings, "vocab_size": tokenizer.size, **ids})).eval()
    return model, evaluated_alone(
        command.Standalone(TrainedModel(model, tokenizer)), tokenizer, corpora or {}, batch_size
    )


def evaluated(
    checkpoint: Path, corpora: Sequence[Path] = (), names: Sequence[str] = (), out: Path | None = None
) -> str:
    """What `pretrain evaluate --json` prints, in this process."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        command.evaluate(checkpoint, [*corpora], names=names, as_json=True, out=out)
    return text.getvalue()


@torch.no_grad()
def log_p(
    model: Any, inputs: Sequence[int], given: Sequence[int], scored: Sequence[int], starts: bool = True
) -> tuple[float, bool]:
    """Σ log p of `scored` after `given` in the decoder, from the model's logits; and whether all are the likeliest.

    Not `starts`: the decoder's start isn't before `given`.
    """
    read = [*([model.config.decoder_start_id] if starts else []), *given, *scored][:-1]
    logits = model.decode(torch.tensor([read]), model.encode(torch.tensor([[*inputs]])))[0, -len(scored) :]
    shares = logits.log_softmax(dim=-1)
    return shares[range(len(scored)), scored].sum().item(), logits.argmax(dim=-1).tolist() == [*scored]


@torch.no_grad()
def log_p_after(model: Any, before: Sequence[int], scored: Sequence[int]) -> float:
    """Σ log p of `scored` after `before` under a decoder-only model, by its losses."""
    whole = torch.tensor([[*before, *scored]])
    prefix = (torch.arange(whole.size(1) - 1) < len(before)).long()[None]
    losses = model(encoder_input_ids=whole[:, :-1], labels=whole[:, 1:], prefix_mask=prefix)["labels"]
    return -float(losses[0, -len(scored) :].sum())
