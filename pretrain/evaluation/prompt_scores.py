"""The likelihoods of prompts under a model."""

from collections.abc import Sequence

import torch

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.evaluation.hook import Evaluation
from pretrain.evaluation.prompt_format import Prompt, PromptFormat


class PromptScores:
    """Scores prompts in batches. All ranks get all prompts and divide them; each then has all scores.

    The model must be whole on each rank.
    """

    def __init__(self, prompt_format: PromptFormat, evaluation: Evaluation, batch_size: int):
        self._format, self._evaluation, self._batch_size = prompt_format, evaluation, batch_size

    def __call__(self, rows: Sequence[Prompt]) -> list[tuple[float, bool]]:
        """For each prompt, Σ log p of its `scored` ids, and whether each of them is the likeliest.

        Longest first, so that rows of a batch are alike and what needs too much memory fails at once.
        """
        order = sorted(range(len(rows)), key=lambda number: -rows[number].length)
        batches = [order[start : start + self._batch_size] for start in range(0, len(order), self._batch_size)]
        found = self._evaluation.shared(batches, lambda mine: [self._of_batch([rows[i] for i in one]) for one in mine])
        by_row = {
            row: score
            for batch, batch_scores in zip(batches, found, strict=True)
            for row, score in zip(batch, batch_scores, strict=True)
        }
        return [by_row[row] for row in range(len(rows))]

    @torch.no_grad()
    def _of_batch(self, rows: Sequence[Prompt]) -> list[tuple[float, bool]]:
        batch = self._format.batch(rows)
        losses, hits = self._evaluation.losses_and_hits(batch, alone=True)
        labels = batch["labels"].to(losses["labels"].device)
        sums = losses["labels"].double().sum(dim=1).neg()
        greedy = (hits | (labels == IGNORE_INDEX)).all(dim=1)
        return list(zip(sums.tolist(), greedy.tolist(), strict=True))
