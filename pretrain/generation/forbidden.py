"""Tokens that the settings forbid."""

import torch
from torch import Tensor

from pretrain.generation.settings import GenerationSettings


def without_forbidden(scores: Tensor, history: Tensor, step: int, settings: GenerationSettings, eos: int) -> Tensor:
    """Returns `scores` (rows, vocabulary) with forbidden tokens set to −∞. They are scores of the token after `history`
    (rows, length), which ends with `step` generated tokens."""
    if step < settings.min_new_tokens:
        scores = scores.index_fill(1, torch.tensor([eos], device=scores.device), -torch.inf)
    if settings.no_repeat_ngram_size:
        scores = scores.masked_fill(repeating(history, settings.no_repeat_ngram_size, scores.size(1)), -torch.inf)
    return scores


def repeating(history: Tensor, size: int, vocab_size: int) -> Tensor:
    """(rows, vocabulary) bool: the tokens that would repeat an n-gram of `size` tokens of `history` (rows, length).

    5 6 7 5 6, size 3    →    7
    """
    rows, length = history.shape
    counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=history.device)
    if length < size:
        return counts > 0
    ngrams = history.unfold(1, size, 1)
    begin, end = ngrams[..., :-1], ngrams[..., -1]
    last = history[:, None, length - size + 1 :]
    again = (begin == last).all(dim=-1) & (end >= 0)  # ignores padding before a prompt
    counts.scatter_add_(1, end.clamp(min=0), again.int())
    return counts > 0
