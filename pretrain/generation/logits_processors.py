"""From logits to the next token, by the rules of transformers' logits processors and warpers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data_pipeline.objectives.randomness import random_bits, row_keys
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


def warped(logits: Tensor, settings: GenerationSettings) -> Tensor:
    """Divides `logits` (batch, vocabulary) by the temperature; sets tokens that `top_k`, then `top_p`, exclude to −∞.

    Rules and order are those of transformers' warpers. `top_k` keeps the k likeliest tokens and ties with the last of
    them. `top_p` is nucleus sampling (Holtzman et al. 2020): it renormalises what `top_k` kept and keeps the likeliest
    tokens, up to and including the one at which their total reaches `top_p`.
    """
    logits = logits / settings.temperature
    if settings.top_k is not None:
        least = logits.topk(min(settings.top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if settings.top_p < 1.0:
        ascending, ids = logits.sort(dim=-1)
        left_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - settings.top_p
        left_out[:, -1] = False
        logits = logits.masked_fill(left_out.scatter(1, ids, left_out), -torch.inf)
    return logits


def uniform_draws(settings: GenerationSettings, numbers: Sequence[int]) -> Tensor:
    """(rows, max_new_tokens) fp32 in [0, 1). A row depends only on the seed and its own number."""
    keys = row_keys(settings.seed, "generation", 0, np.asarray(numbers))
    bits = random_bits(keys, 0, settings.max_new_tokens)
    return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))


def sample(logits: Tensor, draw: Tensor) -> Tensor:
    """Samples one id (batch, 1) per row of logits (batch, vocabulary); `draw` (batch, 1) is uniform in [0, 1)."""
    probabilities, ids = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    mass = probabilities.cumsum(dim=-1)
    rank = torch.searchsorted(mass, draw * mass[:, -1:], right=True)
    last = (probabilities > 0.0).sum(dim=-1, keepdim=True) - 1  # rounding may place a draw beyond the total probability
    return ids.gather(-1, torch.minimum(rank, last))
