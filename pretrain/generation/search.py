"""The choice of each next token, by the rules of transformers: the likeliest, a sample, or those of a beam search."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data_pipeline.objectives.randomness import random_bits, row_keys
from pretrain.config.models import ModelConfig
from pretrain.generation.settings import GenerationSettings


class Search:
    """One text for each example: its likeliest tokens or, at a temperature, samples.

    The first axis of every tensor is that of the examples, whose `numbers` determine their samples. `texts` (examples,
    max_new_tokens) end with eos, then padding. `decided` (examples,): what comes changes them no more.
    """

    def __init__(self, prompt: Tensor, config: ModelConfig, settings: GenerationSettings, numbers: Sequence[int]):
        self.settings, self.eos, self.pad = settings, config.eos_id, config.pad_id
        self.texts = prompt.new_full((len(prompt), settings.max_new_tokens), config.pad_id)
        self.decided = torch.zeros_like(prompt[:, 0], dtype=torch.bool)
        self.draws = uniform_draws(settings, numbers).to(prompt.device) if settings.temperature > 0.0 else None

    def choose(self, scores: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """The next tokens (hypotheses, 1), for scores (hypotheses, vocabulary) of all; and the hypotheses
        (hypotheses,) that they continue, None: each its own."""
        if self.draws is None:
            tokens = scores.argmax(dim=1)
        else:
            tokens = sample(warped(scores, self.settings), self.draws[:, step, None])[:, 0]
        self.texts[:, step] = tokens = tokens.masked_fill(self.decided, self.pad)
        self.decided = self.decided | (tokens == self.eos)
        return tokens[:, None], None

    def keep(self, examples: Tensor) -> None:
        """Drops all examples but these (n,)."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[examples])


class BeamSearch(Search):
    """Each example keeps its `num_beams` likeliest running hypotheses and its `num_beams` best finished ones.

    Each step considers the 2 · `num_beams` likeliest continuations of an example, so that enough remain if half of them
    end. Only those that end among the first `num_beams` become finished hypotheses. Scores are log probabilities.
    """

    def __init__(self, prompt: Tensor, config: ModelConfig, settings: GenerationSettings, numbers: Sequence[int]):
        super().__init__(prompt, config, settings, numbers)
        self.sums = torch.zeros_like(prompt[:, :1], dtype=torch.float32)  # log probabilities of running hypotheses
        self.running = self.texts[:, None]  # at first one
        self.finished = self.running.repeat(1, settings.num_beams, 1)
        self.worth = self.sums.new_full((len(prompt), settings.num_beams), -torch.inf)  # of finished hypotheses
        self.beaten = self.decided[:, None]  # the finished hypotheses can't be beaten

    def choose(self, scores: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        beams, penalty, early = self.settings.num_beams, self.settings.length_penalty, self.settings.early_stopping
        length, most = step + 1, self.settings.max_new_tokens
        examples, width = self.sums.shape
        sums, best = (self.sums.view(-1, 1) + scores).view(examples, -1).topk(2 * beams)
        origin, tokens = best // scores.size(1), best % scores.size(1)
        continued = _chosen(self.running, origin)
        continued[:, :, step] = tokens
        ended = (tokens == self.eos) | (length == most)

        new = (sums / length**penalty).masked_fill(~ended | self.decided[:, None], -torch.inf)
        new[:, beams:] = -torch.inf
        self.worth, best = torch.cat([self.worth, new], dim=1).topk(beams)
        self.finished = _chosen(torch.cat([self.finished, continued], dim=1), best)
        self.texts = self.finished[:, 0]

        self.sums, best = sums.masked_fill(ended, -torch.inf).topk(beams)
        self.running = _chosen(continued, best)
        reach = most if early == "never" and penalty > 0.0 else length
        worst = self.worth[:, -1:]
        self.beaten = self.beaten | (self.sums[:, :1] / reach**penalty <= worst)
        self.decided = (self.beaten | (worst > -torch.inf) if early is True else self.beaten)[:, 0]
        origin = origin.gather(1, best) + width * torch.arange(examples, device=best.device)[:, None]
        return tokens.gather(1, best).view(-1, 1), origin.flatten()


def _chosen(texts: Tensor, chosen: Tensor) -> Tensor:
    """Selects from texts (examples, n, length) those `chosen` (examples, k): (examples, k, length)."""
    return texts.gather(1, chosen[..., None].expand(-1, -1, texts.size(2)))


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
