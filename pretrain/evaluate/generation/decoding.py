"""Decoding with key-value caches, in one loop for every family. The next token is chosen by the rules of transformers:
greedily, by sampling, or by beam search."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError, one_line
from data_pipeline.objectives.randomness import random_bits, row_keys
from pretrain.config.models import ModelConfig
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.models.attention import KeyValueCache, MemoryCache
from pretrain.models.model import Model
from pretrain.models.stacks import EncoderDecoder


class Search:
    """One text for each example: its likeliest tokens or, at a temperature, samples.

    The first axis of every tensor is that of the examples, whose `numbers` determine their samples. `texts` (examples,
    max_new_tokens) end with eos, then padding. `decided` (examples,): what comes changes them no more.
    """

    def __init__(self, prompt: Tensor, config: ModelConfig, settings: GenerationSettings, numbers: Sequence[int]):
        self.settings = settings
        self.eos = config.eos_id
        self.pad = config.pad_id
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
        beams = self.settings.num_beams
        penalty = self.settings.length_penalty
        early = self.settings.early_stopping
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


# Examples that are decided leave the batch once this share of it, or less, is left: leaving costs a copy of the caches.
LEAVE_AT = 0.75
_NO_MEMORY = "can't allocate memory"  # PyTorch has no class of its own for this error of a CPU
NO_TOKEN = -1  # in a history: padding before a prompt


@torch.no_grad()
def generate(
    model: Model,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    settings: GenerationSettings | None = None,
    *,
    numbers: Sequence[int] | None = None,
) -> Tensor:
    """Generates ids (batch, at most max_new_tokens) for inputs (batch, length): each row ends with eos, then padding.

    Inputs are for the encoder, or prompts of a causal model, padded on the left. `attention_mask`, of the same shape,
    is nonzero at real tokens. The seed and a row's number (`numbers`, by default from 0) determine its samples, in any
    batch. Probabilities count all rows of a padded vocabulary, as in training and in transformers, but padding is never
    chosen. Raises UserError for settings that the model doesn't support, and if there is too little memory.
    """
    settings, config = settings or GenerationSettings(), model.config
    _check(model, input_ids.size(1), settings)
    was_training = model.training
    model.eval()
    try:
        decoder = Decoder(model, input_ids, attention_mask)
        tokens, history = decoder.prompt, decoder.history
        numbers = range(len(tokens)) if numbers is None else numbers
        search = (BeamSearch if settings.num_beams > 1 else Search)(tokens, config, settings, numbers)
        result = search.texts.clone()
        rows = torch.arange(len(tokens), device=tokens.device)  # the examples still in the batch
        for step in range(settings.max_new_tokens):
            scores = decoder.step(tokens).float()
            scores = scores.log_softmax(dim=1) if settings.num_beams > 1 else scores
            scores = without_forbidden(scores[:, : config.vocab_size], history, step, settings, config.eos_id)
            tokens, origin = search.choose(scores, step)
            left = int((~search.decided).sum())
            if left == 0:
                break
            if origin is not None:
                decoder.select(origin)
                history = history[origin]
            history = torch.cat([history, tokens], dim=1)
            if left <= LEAVE_AT * len(rows):
                result[rows] = search.texts
                stay = (~search.decided).nonzero()[:, 0]
                hypotheses = torch.arange(len(tokens), device=tokens.device).view(len(rows), -1)[stay].flatten()
                decoder.select(hypotheses)
                search.keep(stay)
                rows = rows[stay]
                tokens = tokens[hypotheses]
                history = history[hypotheses]
        result[rows] = search.texts
        before_eos = (result == config.eos_id).cumsum(dim=1) == 0
        return result[:, : int(before_eos.sum(dim=1).max()) + 1]
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _NO_MEMORY not in str(error):
            raise
        texts = f"{len(input_ids)} texts of up to {input_ids.size(1):,} tokens"
        raise UserError(
            f"too little memory for {texts} together: {one_line(error)}; give shorter ones, or fewer"
        ) from None
    finally:
        model.train(was_training)


def _check(model: Model, length: int, settings: GenerationSettings) -> None:
    vocab_size, longest = model.config.vocab_size, model.config.longest_sequence
    assert vocab_size is not None
    if 2 * settings.num_beams > vocab_size:
        raise UserError(f"num_beams: {settings.num_beams} beams need twice as many ids, not {vocab_size}")
    if longest is not None and length > longest:
        raise UserError(f"an input has {length} tokens, but the model takes {longest} at most")
    prompt = 1 if isinstance(model, EncoderDecoder) else length
    if longest is not None and prompt + settings.max_new_tokens - 1 > longest:  # the last token is not read again
        raise UserError(
            f"max_new_tokens: {settings.max_new_tokens} tokens after {prompt} exceed the {longest} that the model takes"
        )


class Decoder:
    """A model with its caches, for a batch of examples.

    Hypotheses are rows in the order of their examples, each of which has the same number of them, at first one.
    `prompt` (examples, length): the tokens to start from. `history`: the same, NO_TOKEN at padding.
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None):
        """Takes the inputs of `generate`. Raises UserError for a model that doesn't generate."""
        if not hasattr(model, "new_cache"):
            raise UserError(f"models of the family {model.config.family} don't generate text")
        self._model, self._cache = model, model.new_cache()
        self._mask, self._rows = attention_mask, len(input_ids)
        self._states: Tensor | None = None
        if isinstance(model, EncoderDecoder):
            self._states = model.encode(input_ids, attention_mask)
            self.prompt = self.history = torch.full_like(input_ids[:, :1], model.config.decoder_start_id)
        else:
            self.prompt = input_ids
            self.history = input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, NO_TOKEN)

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` (hypotheses, new) and returns the logits (hypotheses, padded vocabulary) of the next one."""
        if self._states is not None:
            return self._model.decode(tokens, self._states, self._mask, self._cache)[:, -1]
        logits = self._model.decode(tokens, self._cache, self._mask)[:, -1]
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        return logits

    def select(self, rows: Tensor) -> None:
        """Hypothesis i continues hypothesis `rows[i]`, of the same example, which shares its input, unless their
        number changes."""
        moved = len(rows) != self._rows
        for cache in _caches(self._cache):
            if moved or not isinstance(cache, MemoryCache):
                cache.select(rows)
        if moved:
            self._rows = len(rows)
            self._states = None if self._states is None else self._states[rows]
            self._mask = None if self._mask is None else self._mask[rows]


def _caches(caches: Any) -> Iterator[KeyValueCache]:
    """All caches in a family's own lists and tuples."""
    if isinstance(caches, KeyValueCache):
        yield caches
    else:
        for part in caches:
            yield from _caches(part)
