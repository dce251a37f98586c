"""Tokens that settings forbid at a place."""

import torch
from torch import Tensor

from pretrain.generation.settings import GenerationSettings


def without_forbidden(scores: Tensor, history: Tensor, step: int, settings: GenerationSettings, eos: int) -> Tensor:
    """`scores` (rows, vocabulary) of the token after `history` (rows, length) and `step` generated tokens, −∞ at
    those that must not come."""
    if step < settings.min_new_tokens:
        scores = scores.index_fill(1, torch.tensor([eos], device=scores.device), -torch.inf)
    if settings.no_repeat_ngram_size:
        scores = scores.masked_fill(repeating(history, settings.no_repeat_ngram_size, scores.size(1)), -torch.inf)
    return scores


def repeating(history: Tensor, size: int, vocab_size: int) -> Tensor:
    """(rows, vocabulary) bool: tokens that after `history` (rows, length) would end an n-gram of `size` that it has.

    5 6 7 5 6, size 3    →    7
    """
    rows, length = history.shape
    counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=history.device)
    if length < size:
        return counts > 0
    ngrams = history.unfold(1, size, 1)
    begin, end = ngrams[..., :-1], ngrams[..., -1]
    last = history[:, None, length - size + 1 :]
    again = (begin == last).all(dim=-1) & (end >= 0)  # padding before a prompt is no token
    counts.scatter_add_(1, end.clamp(min=0), again.int())
    return counts > 0
