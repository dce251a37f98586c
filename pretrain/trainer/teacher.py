"""The teacher of a run: a frozen decoder-only model, whole on each rank's device and outside of DeepSpeed."""

from dataclasses import dataclass
from typing import cast

import torch

from data_pipeline.loading.batches import Batch
from data_pipeline.loading.texts import TEXTS, with_texts, without_texts
from pretrain.checkpoint.trained import TrainedModel
from pretrain.config.run_config import DistillationSection
from pretrain.models.decoder_only import DecoderOnly
from pretrain.models.distilled_loss import TeacherTargets
from pretrain.models.model import Sizes
from pretrain.trainer.teacher_checks import teacher_checkpoint


@dataclass(frozen=True)
class Teacher:
    """Computes a student's teacher targets for micro-batches of prefix LM, in evaluation mode, without gradients.

    `vocabulary`: the ids of its tokenizer, all of which the student has. Its model may have more rows.
    """

    model: DecoderOnly
    vocabulary: int
    settings: DistillationSection

    @classmethod
    def load(cls, settings: DistillationSection, precision: str, device: torch.device) -> "Teacher":
        """Raises FailedError if the teacher's checkpoint is damaged."""
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        trained = TrainedModel.open(teacher_checkpoint(settings))
        model = cast(DecoderOnly, trained.model.to(device, dtype).requires_grad_(False))
        return cls(model, min(trained.tokenizer.size, model.config.padded_vocab_size), settings)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[str, object]:
        """The arguments of the student's `forward`: those of `batch`, without its `TEXTS`, and `teacher_targets`."""
        texts = batch if TEXTS[0] in batch else with_texts(batch)
        ids, indices, in_text = (texts[name].to(self.model.embedding.weight.device) for name in TEXTS)
        states = self.model.decoder(self.model.embedding(ids)).flatten(0, 1)
        teacher_targets = TeacherTargets(
            self.model.lm_head,
            states.index_select(0, indices),
            self.vocabulary,
            self.settings.weight * in_text.float(),
            self.settings.temperature,
            self.settings.top_k,
        )
        return {**without_texts(batch), "teacher_targets": teacher_targets}


def forward_flops(teacher: DecoderOnly, sizes: Sizes) -> float:
    """FLOPs of the teacher in a step of examples of these sizes: its forward pass over their texts.

    Of an example with I inputs and T targets, EOS tokens included, it reads I + T − 3 tokens.
    """
    read = sizes.inputs + sizes.targets - 3 * sizes.examples
    pairs = sizes.input_pairs + sizes.target_pairs + 2 * sizes.cross_pairs
    pairs += 9 * sizes.examples - 6 * (sizes.inputs + sizes.targets)
    return teacher.flops(Sizes(sizes.examples, read, 0, pairs, 0, 0)) / 3
