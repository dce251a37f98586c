"""`generate` and `search`: greedy decoding, sampling and beam search with key-value caches, for every family, by
transformers' rules."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_pipeline.base.errors import UserError, one_line
from data_pipeline.corpus.objectives.randomness import random_bits, row_keys
from pretrain.config.model_config import ModelConfig
from pretrain.evaluate.generation.allowed import Trie
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.models.attention import KeyValueCache, MemoryCache
from pretrain.models.model import Model
from pretrain.models.stacks import EncoderDecoder


class Search:
    """Greedy decoding or, at a temperature, sampling: one text for each example.

    Attributes:
        texts: (examples, num_return_sequences, max_new_tokens), each ending with EOS, then padding.
        scores: (examples, num_return_sequences) fp32, of beam search; else 0.
        decided: (examples,) True if further tokens don't change the texts.
    """

    def __init__(self, prompt: Tensor, config: ModelConfig, settings: GenerationSettings, numbers: Sequence[int]):
        self.settings = settings
        self.eos = config.eos_id
        self.pad = config.pad_id
        self.texts = prompt.new_full((len(prompt), 1, settings.max_new_tokens), config.pad_id)
        self.scores = torch.zeros_like(prompt[:, :1], dtype=torch.float32)
        self.decided = torch.zeros_like(prompt[:, 0], dtype=torch.bool)
        self.draws = uniform_draws(settings, numbers).to(prompt.device) if settings.temperature > 0.0 else None

    def choose(self, scores: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """The next tokens (hypotheses, 1), for scores (hypotheses, vocabulary), and the hypotheses (hypotheses,) that
        they continue; None: each continues its own."""
        if self.draws is None:
            tokens = scores.argmax(dim=1)
        else:
            tokens = sample(warped(scores, self.settings), self.draws[:, step, None])[:, 0]
        self.texts[:, 0, step] = tokens = tokens.masked_fill(self.decided, self.pad)
        self.decided = self.decided | (tokens == self.eos)
        return tokens[:, None], None

    def keep(self, examples: Tensor) -> None:
        """Keeps these examples (n,) and drops the others."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[examples])


class BeamSearch(Search):
    """Beam search. Each example has its `num_beams` likeliest running and its `num_beams` best finished hypotheses.

    A step takes the 2 · `num_beams` likeliest continuations of an example, so that enough remain if half of them end. A
    continuation that ends becomes a finished hypothesis only among the first `num_beams`. Scores are log probabilities.
    """

    def __init__(self, prompt: Tensor, config: ModelConfig, settings: GenerationSettings, numbers: Sequence[int]):
        super().__init__(prompt, config, settings, numbers)
        self.sums = self.scores  # log probabilities of running hypotheses
        self.running = self.texts  # one at first
        self.finished = self.running.repeat(1, settings.num_beams, 1)
        self.worth = self.sums.new_full((len(prompt), settings.num_beams), -torch.inf)  # scores of finished hypotheses
        self.texts = self.finished[:, : settings.num_return_sequences]
        self.scores = self.worth[:, : settings.num_return_sequences]
        self.beaten = self.decided[:, None]  # True if no running hypothesis can beat the finished ones

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
        self.texts = self.finished[:, : self.settings.num_return_sequences]
        self.scores = self.worth[:, : self.settings.num_return_sequences]

        self.sums, best = sums.masked_fill(ended, -torch.inf).topk(beams)
        self.running = _chosen(continued, best)
        reach = most if early == "never" and penalty > 0.0 else length
        worst = self.worth[:, -1:]
        self.beaten = self.beaten | (self.sums[:, :1] / reach**penalty <= worst)
        self.decided = (self.beaten | (worst > -torch.inf) if early is True else self.beaten)[:, 0]
        origin = origin.gather(1, best) + width * torch.arange(examples, device=best.device)[:, None]
        return tokens.gather(1, best).view(-1, 1), origin.flatten()


def _chosen(texts: Tensor, chosen: Tensor) -> Tensor:
    """The texts (examples, k, length) with the indices `chosen` (examples, k), of `texts` (examples, n, length)."""
    return texts.gather(1, chosen[..., None].expand(-1, -1, texts.size(2)))


def without_forbidden(scores: Tensor, history: Tensor, step: int, settings: GenerationSettings, eos: int) -> Tensor:
    """`scores` (rows, vocabulary) of the token after `history` (rows, length), with −∞ for forbidden tokens. `history`
    ends with `step` generated tokens."""
    if step < settings.min_new_tokens:
        scores = scores.index_fill(1, torch.tensor([eos], device=scores.device), -torch.inf)
    if settings.no_repeat_ngram_size:
        scores = scores.masked_fill(repeating(history, settings.no_repeat_ngram_size, scores.size(1)), -torch.inf)
    return scores


def repeating(history: Tensor, size: int, vocab_size: int) -> Tensor:
    """True (rows, vocabulary) for tokens that would repeat an n-gram of `size` tokens of `history` (rows, length).

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
    """`logits` (batch, vocabulary) divided by the temperature, with −∞ for tokens that `top_k`, then `top_p`, exclude.

    Rules and order are as in transformers' warpers. `top_k` keeps the k likeliest tokens, and ties with the last of
    them. `top_p` is nucleus sampling (Holtzman et al. 2020): after renormalization, it keeps the likeliest tokens until
    their total reaches `top_p`.
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
    """Draws (rows, max_new_tokens), fp32 in [0, 1). A row depends on the seed and on its number only."""
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


# Decided examples leave the batch once at most this share of the batch is undecided: leaving copies the caches.
LEAVE_AT = 0.75
_NO_MEMORY = "can't allocate memory"  # PyTorch has no exception class for this error on a CPU
NO_TOKEN = -1  # padding before a prompt, in a history


class Found(NamedTuple):
    """What `search` found.

    Attributes:
        tokens: (batch, num_return_sequences, at most max_new_tokens) ids; a row ends with EOS, then padding.
        scores: (batch, num_return_sequences) fp32: the log probability divided by length^length_penalty, the largest
            first; 0 without beam search. −∞: no text, since fewer are `allowed`.
    """

    tokens: Tensor
    scores: Tensor


def generate(
    model: Model,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    settings: GenerationSettings | None = None,
    *,
    numbers: Sequence[int] | None = None,
) -> Tensor:
    """Generates ids (batch · num_return_sequences, at most max_new_tokens) for inputs (batch, length), as `search`
    does. A row ends with EOS, then padding."""
    return search(model, input_ids, attention_mask, settings, numbers=numbers).tokens.flatten(0, 1)


@torch.no_grad()
def search(
    model: Model,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    settings: GenerationSettings | None = None,
    *,
    numbers: Sequence[int] | None = None,
    allowed: Trie | None = None,
    row_multiple: int = 1,
) -> Found:
    """Generates texts for inputs (batch, length).

    Args:
        input_ids: the encoder's inputs or, for a causal model, prompts padded on the left.
        attention_mask: of the shape of `input_ids`, nonzero at real tokens. None: no padding.
        settings: default: greedy decoding.
        numbers: the numbers of the rows, which with the seed determine their samples. None: from 0.
        allowed: the only texts to generate. Probabilities still count all other tokens.
        row_multiple: the model reads a multiple of this number of rows in each step. CPUs round products of a multiple
            of 8 rows alike, so a row without padding is the same to the bit in any batch.

    As in training and in transformers, probabilities count all rows of a padded vocabulary, but padding is never
    chosen. Raises UserError for settings that the model doesn't support, and if there is too little memory.
    """
    settings, config = settings or GenerationSettings(), model.config
    _check(model, input_ids.size(1), settings, allowed)
    was_training = model.training
    model.eval()
    try:
        count = len(input_ids)
        numbers = range(count) if numbers is None else numbers
        if more := -count % row_multiple:
            repeated = torch.arange(count + more, device=input_ids.device).clamp(max=count - 1)
            input_ids, numbers = input_ids[repeated], [*numbers, *[numbers[-1]] * more]
            attention_mask = None if attention_mask is None else attention_mask[repeated]
        decoder = Decoder(model, input_ids, attention_mask)
        tokens, history = decoder.prompt, decoder.history
        searched = (BeamSearch if settings.num_beams > 1 else Search)(tokens, config, settings, numbers)
        texts, worth = searched.texts.clone(), searched.scores.clone()
        rows = torch.arange(len(tokens), device=tokens.device)  # the examples still in the batch
        allowed = None if allowed is None else allowed.to(tokens.device)
        nodes = torch.zeros_like(rows)  # of `allowed`, for each hypothesis
        for step in range(settings.max_new_tokens):
            scores = decoder.step(tokens).float()
            scores = scores.log_softmax(dim=1) if settings.num_beams > 1 else scores
            scores = without_forbidden(scores[:, : config.vocab_size], history, step, settings, config.eos_id)
            scores = scores if allowed is None else allowed.only(scores, nodes)
            tokens, origin = searched.choose(scores, step)
            left = int((~searched.decided).sum())
            if left == 0:
                break
            if origin is not None:
                decoder.select(origin)
                history, nodes = history[origin], nodes[origin]
            history = torch.cat([history, tokens], dim=1)
            nodes = nodes if allowed is None else allowed.after(nodes, tokens[:, 0])
            left += -left % row_multiple
            if left <= LEAVE_AT * len(rows):
                texts[rows], worth[rows] = searched.texts, searched.scores
                stay = searched.decided.int().argsort(stable=True)[:left].sort().values
                hypotheses = torch.arange(len(tokens), device=tokens.device).view(len(rows), -1)[stay].flatten()
                decoder.select(hypotheses)
                searched.keep(stay)
                rows = rows[stay]
                tokens, nodes = tokens[hypotheses], nodes[hypotheses]
                history = history[hypotheses]
        texts[rows], worth[rows] = searched.texts, searched.scores
        texts, worth = texts[:count], worth[:count]
        before_eos = (texts == config.eos_id).cumsum(dim=2) == 0
        return Found(texts[:, :, : int(before_eos.sum(dim=2).max()) + 1], worth)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _NO_MEMORY not in str(error):
            raise
        together = f"{len(input_ids)} texts of up to {input_ids.size(1):,} tokens together"
        raise UserError(f"too little memory for {together}: {one_line(error)}; give shorter texts, or fewer") from None
    finally:
        model.train(was_training)


def _check(model: Model, length: int, settings: GenerationSettings, allowed: Trie | None) -> None:
    vocab_size, longest = model.config.vocab_size, model.config.longest_sequence
    assert vocab_size is not None
    if allowed is not None:
        allowed.check(settings)
    if 2 * settings.num_beams > vocab_size:
        raise UserError(f"num_beams: {settings.num_beams} beams need twice as many ids, not {vocab_size}")
    if longest is not None and length > longest:
        raise UserError(f"an input has {length} tokens, but the model takes {longest} at most")
    prompt = 1 if isinstance(model, EncoderDecoder) else length
    if longest is not None and prompt + settings.max_new_tokens - 1 > longest:  # the last token is not read again
        tokens = f"{settings.max_new_tokens} tokens after {prompt}"
        raise UserError(f"max_new_tokens: {tokens} exceed the {longest} that the model takes")


class Decoder:
    """A model with its caches, for a batch of examples. All examples have equally many hypotheses, one at first; a row
    is a hypothesis, in the order of the examples.

    Attributes:
        prompt: (examples, length) the tokens to start from.
        history: `prompt` with NO_TOKEN at padding.
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None):
        """Takes arguments of `generate`. Raises UserError for a model that doesn't generate text."""
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
        """Lets row i continue row `rows[i]`. If the number of rows stays, both rows belong to the same example, whose
        cache of the input is kept."""
        moved = len(rows) != self._rows
        for cache in _caches(self._cache):
            if moved or not isinstance(cache, MemoryCache):
                cache.select(rows)
        if moved:
            self._rows = len(rows)
            self._states = None if self._states is None else self._states[rows]
            self._mask = None if self._mask is None else self._mask[rows]


def _caches(caches: Any) -> Iterator[KeyValueCache]:
    """All caches in the lists and tuples that a family returns."""
    if isinstance(caches, KeyValueCache):
        yield caches
    else:
        for part in caches:
            yield from _caches(part)
