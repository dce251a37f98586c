"""Distillation: a student learns from the text and from a teacher's distribution (Hinton et al., "Distilling the
Knowledge in a Neural Network", 2015; from a decoder in prefix LM as T5Gemma, Zhang et al. 2025).

z are the student's logits at a target, u the teacher's logits at the same token of the same text, T is the temperature
and w the weight:

    loss = (1 − w) · cross-entropy(z) + w · T² · KL(p ‖ q),   p = softmax(u / T),   q = softmax(z / T)

The gradient of the KL divergence falls as 1 / T², so the factor T² keeps its size (section 2 of Hinton et al.). p is
over the teacher's whole vocabulary. With `top_k`, the k likeliest ids keep their probabilities, divided by their sum,
and all other ids have none. q is over the student's whole vocabulary. The cross-entropy has the student's label
smoothing. The student's z-loss isn't weighted. Each rank has the whole teacher on its device, outside of DeepSpeed.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.base.atomic import sha256
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.objectives.language_modelling import PrefixLM
from data_pipeline.corpus.tokenizer import load as load_tokenizer
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.stream import differences
from distillation.settings import DistillationSettings
from pretrain import models
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.models import DecoderOnlyConfig, ModelConfig
from pretrain.models.attention import AttentionInputs
from pretrain.models.decoder_only import DecoderOnly
from pretrain.models.functional.arithmetic import at_least_fp32, indices_of_targets, soft_capped, token_losses
from pretrain.models.model import Head, Losses, Model

LOGITS_PER_CHUNK = 1 << 26  # a few fp32 tensors of this size exist at once
_IDS = ("kind", "sha256", "special_tokens")
_INPUTS = {True: "bos … eos", False: "… eos"}


def problems(settings: DistillationSettings, model: ModelConfig, training: list[Corpus]) -> list[str]:
    """Why a run of `model` can't be distilled from its teacher, one line for each reason."""
    able = [name for name, family in models.FAMILIES.items() if "prefix_lm" in family.objectives]
    found = []
    if model.family not in able:
        found.append(f"wrapper: needs an encoder-decoder ({', '.join(able)}), but model.family is {model.family}")
    try:
        teacher = checkpoint_index.read(_checkpoint(settings)).model
        theirs = vars(load_tokenizer(_checkpoint(settings)).describe())
    except (UserError, FailedError) as error:
        return [*found, f"wrapper.teacher: {error}"]
    ours = vars(training[0].manifest.tokenizer)
    if isinstance(teacher, DecoderOnlyConfig):
        found += _not_for_a_decoder(teacher, training, f"wrapper.teacher: {settings.teacher}")
        # sentinels have the last ids, and text has none
        keys = _IDS if theirs["sentinels"] == 0 else (*_IDS, "sentinels")
    elif teacher.family in able:
        found += _not_for_an_encoder_decoder(teacher, model, training, f"wrapper.teacher: {settings.teacher}")
        keys = (*_IDS, "sentinels")
    else:
        expected = f"a model of the family {teacher.family}; expected an encoder-decoder or a decoder_only model"
        return [*found, f"wrapper.teacher: {settings.teacher}: {expected}"]
    found += [
        f"wrapper.teacher: {settings.teacher}: {line}"
        for line in differences(*({f"tokenizer.{key}": one.get(key) for key in keys} for one in (theirs, ours)))
    ]
    return found


def _not_for_a_decoder(teacher: DecoderOnlyConfig, training: list[Corpus], name: str) -> list[str]:
    """Why the decoder `teacher` can't read the rows. `name`: what lines call the teacher."""
    objectives = [corpus.objective for corpus in training]
    found = [
        f"wrapper: a decoder_only teacher needs rows that are a text cut in two (prefix_lm), but {corpus.location} has "
        f"{objective.name}"
        for corpus, objective in zip(training, objectives, strict=True)
        if not isinstance(objective, PrefixLM)
    ]
    rows = [one.raw_length // (2 if one.packed else 1) for one in objectives if isinstance(one, PrefixLM)]
    longest = max(rows, default=1) - 1  # nothing is predicted from a text's last token
    if longest > (teacher.longest_sequence or longest):
        most = f"reads {teacher.longest_sequence} tokens at most, but texts of the rows have {longest}"
        found.append(f"{name}: {most}")
    return found


def _not_for_an_encoder_decoder(
    teacher: ModelConfig, model: ModelConfig, training: list[Corpus], name: str
) -> list[str]:
    """Why the encoder-decoder `teacher` can't read what `model` reads. `name`: what lines call the teacher."""
    found = []
    there, here = (models.FAMILIES[one.family].inputs_begin_with_bos for one in (teacher, model))
    if there != here:
        found.append(
            f"{name}: inputs of the family {teacher.family} are {_INPUTS[there]}, but those of {model.family} are "
            f"{_INPUTS[here]}"
        )
    longest = max(max(corpus.objective.shape) for corpus in training)
    if longest > (teacher.longest_sequence or longest):
        most = f"reads {teacher.longest_sequence} tokens at most, but inputs or targets have {longest}"
        found.append(f"{name}: {most}")
    return found


def identity(settings: DistillationSettings) -> checkpoint_index.Identity:
    """The settings that may not change over the life of a run: all but the teacher's path. The teacher's content is
    known by the sha256 of its index, which has the checksums of its files."""
    index = _checkpoint(settings) / checkpoint_index.INDEX
    return {"teacher_sha256": sha256(index), **settings.model_dump(exclude={"teacher"})}


def load(settings: DistillationSettings, precision: str, device: torch.device) -> Callable[[nn.Module], "Distillation"]:
    """Loads the teacher on all ranks together; returns a function that wraps a student. Raises FailedError if the
    teacher's checkpoint is damaged."""
    trained = TrainedModel.open(_checkpoint(settings), together=True)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    teacher = trained.model.to(device, dtype).requires_grad_(False)
    vocabulary = min(trained.tokenizer.size, teacher.config.padded_vocab_size)
    return lambda student: Distillation(student, teacher, vocabulary, settings)


def _checkpoint(settings: DistillationSettings) -> Path:
    return checkpoint_in(Path(settings.teacher))


class Distillation(nn.Module):
    """The losses of `student` in training: an encoder-decoder, or DeepSpeed's engine around it. Evaluation calls the
    student itself.

    `teacher`: a decoder_only model or an encoder-decoder, in evaluation mode. `vocabulary`: the number of ids of its
    tokenizer. The student has all of them; the teacher's embedding may have more rows.
    """

    def __init__(self, student: nn.Module, teacher: Model, vocabulary: int, settings: DistillationSettings):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.vocabulary = vocabulary
        self.settings = settings

    def forward(self, **batch: Tensor) -> Losses:
        """Returns, each (batch, targets): "labels", the loss, which alone has a gradient; "cross_entropy", the loss
        without a teacher; "distillation_loss", T² · KL, 0 at targets that the teacher doesn't predict."""
        losses = self.student(**batch, loss=partial(self.losses, *self.read(batch)))["labels"]
        loss, cross_entropy, divergence = losses.unbind()
        return {"labels": loss, "cross_entropy": cross_entropy.detach(), "distillation_loss": divergence.detach()}

    @torch.no_grad()
    def read(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the teacher's output matrix takes at each label (batch, targets, d_teacher), and a mask (batch, targets)
        of the labels that the teacher predicts."""
        if isinstance(self.teacher, DecoderOnly):
            states, predicted = self._read_as_text(self.teacher, batch)
            return self.teacher.lm_head.scaled(states), predicted
        states = self.teacher(**batch, loss=lambda head, x, *_: x)["labels"]
        return states, batch["labels"] != IGNORE_INDEX

    def _read_as_text(self, teacher: DecoderOnly, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The states of a decoder (batch, targets, d_teacher) at the token before each label, and a mask (batch,
        targets) of the labels that are tokens of the text. The EOS tokens that prefix LM has added are not.

        The teacher reads a row's texts one after the other: each example's input and target without their EOS tokens.
        """
        ids, labels = batch["encoder_input_ids"], batch["labels"]
        inputs = batch.get("encoder_segment_ids", batch.get("encoder_attention_mask", torch.ones_like(ids)))
        in_text = _without_last((labels != IGNORE_INDEX) * batch.get("decoder_segment_ids", torch.ones_like(labels)))
        segments = torch.cat([_without_last(inputs), in_text], dim=1)
        order = segments.where(segments > 0, segments.size(1) + 1).argsort(dim=1, stable=True)  # others come last
        texts, segments = torch.cat([ids, labels.clamp(min=0)], dim=1).gather(1, order), segments.gather(1, order)
        places = torch.arange(segments.size(1), device=ids.device).expand_as(segments)
        begins = segments.diff(dim=1, prepend=segments.new_full((len(segments), 1), -1)) != 0
        positions = places - (places * begins).cummax(dim=1).values
        # beyond are only last tokens of texts, from which nothing is predicted
        most = teacher.config.longest_sequence or segments.size(1)
        attention = AttentionInputs(
            encoder_segment_ids=segments if "decoder_segment_ids" in batch else None,
            encoder_positions=positions.clamp(max=most - 1),
        )
        states = teacher.decoder(teacher.embedding(texts), attention)
        before = (order.argsort(dim=1)[:, ids.size(1) :] - 1).clamp(min=0)
        return states.gather(1, before[..., None].expand(-1, -1, states.size(-1))), in_text > 0

    def losses(
        self,
        teacher_states: Tensor,
        in_text: Tensor,
        head: Head,
        x: Tensor,
        labels: Tensor,
        config: ModelConfig,
        target_indices: Tensor | None,
    ) -> Tensor:
        """(3, batch, targets) The losses of `forward`, from the student's states `x` (batch, targets, d_model).

        Only one chunk of the logits exists at a time. The backward pass computes the chunk again.
        """
        indices = indices_of_targets(labels) if target_indices is None else target_indices
        tensors = x, labels, teacher_states, in_text
        rows = [one.flatten(0, 1).index_select(0, indices) for one in tensors]
        # in fp32: summed in bf16, the gradient of a chunk would be lost among those of the others
        weight = head.weight.to(at_least_fp32(x))
        step = max(1, LOGITS_PER_CHUNK // len(weight))
        of_chunk = partial(self._losses_of_chunk, head, config)
        chunks = [
            checkpoint(of_chunk, weight, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*(one.split(step) for one in rows), strict=True)
        ]
        found = torch.cat(chunks, dim=1)
        return found.new_zeros(len(found), labels.numel()).index_copy(1, indices, found).view(-1, *labels.shape)

    def _losses_of_chunk(
        self,
        head: Head,
        config: ModelConfig,
        weight: Tensor,
        x: Tensor,
        labels: Tensor,
        teacher_states: Tensor,
        in_text: Tensor,
    ) -> Tensor:
        """(3, n) The loss, the cross-entropy and T² · KL of states x (n, d_model)."""
        temperature, top_k = self.settings.temperature, self.settings.top_k
        logits = _logits(head, weight, x).to(weight.dtype)
        with torch.no_grad():
            output = cast("Head", self.teacher.lm_head)
            of_teacher = _logits(output, output.weight, teacher_states)
            of_teacher = of_teacher[:, : self.vocabulary].to(weight.dtype) / temperature
        log_q = torch.log_softmax(logits / temperature, dim=-1)
        if top_k is None or top_k >= self.vocabulary:
            log_q = log_q[:, : self.vocabulary]
        else:
            of_teacher, ids = of_teacher.topk(top_k, dim=-1)
            log_q = log_q.gather(-1, ids)
        log_p = torch.log_softmax(of_teacher, dim=-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1) * temperature**2 * in_text
        own = token_losses(logits, labels, 0.0, config.label_smoothing)
        z_loss = config.z_loss * logits.logsumexp(dim=-1).square()
        weights = self.settings.weight * in_text.to(weight.dtype)
        loss = (1 - weights) * own + weights * divergence + z_loss
        return torch.stack([loss, (own + z_loss).detach(), divergence.detach()])


def _logits(head: Head, weight: Tensor, x: Tensor) -> Tensor:
    """(n, vocabulary) from states x (n, d_model) that are scaled already. `weight`: the output matrix."""
    return soft_capped(F.linear(x, weight.to(x.dtype), head.offsets(x)), head.softcap)


def _without_last(segments: Tensor) -> Tensor:
    """[[1, 1, 1, 2, 2, 0]] → [[1, 1, 0, 2, 0, 0]]"""
    following = torch.cat([segments[:, 1:], torch.zeros_like(segments[:, :1])], dim=1)
    return segments * (segments == following)
