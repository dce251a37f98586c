"""Masks spans in held-out sentences for a model to fill, and finds the likeliest fillings of a span."""

import itertools
import re
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_pipeline.base.errors import UserError
from data_pipeline.base.open_store import open_store
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.documents import all_documents
from data_pipeline.corpus.objectives.randomness import random_bits, row_keys
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.texts import input_ids
from pretrain.models.stacks import EncoderDecoder

_LENGTHS = range(10, 25)  # words of a sentence
_WORD = re.compile(r"(?<= )[^\W\d_]+(?= )")
_WORDS_PER_BLANK = 7
_WIDTH = 4  # beams for each filling that is asked for
_LONGEST = 8  # tokens of a filling


def blank_out(corpus: Corpus, tokenizer: Tokenizer, objective: str, number: int, seed: int) -> list[tuple[str, str]]:
    """Pairs (sentence with masked words, sentence) from the first `number` suitable held-out documents.

    One in seven words with a space on each side is masked, but never two neighbours; a hash of `seed` and of the
    sentence's number chooses. Masks are <extra_id_k>, or <mask> if the model's training `objective` is denoising or the
    tokenizer has no sentinels. Raises UserError if the tokenizer has neither.
    """
    if not can_blank_out(tokenizer):
        raise UserError("--corpus: masking needs sentinels or a mask token, but the model's tokenizer has neither")
    found = []
    has_mask = tokenizer.vocabulary.mask is not None
    masks = has_mask and (objective == "denoising" or not tokenizer.sentinels)
    for position, sentence in enumerate(itertools.islice(_held_out_sentences(corpus), number)):
        words = list(_WORD.finditer(sentence))
        keys = row_keys(seed, "blanks", 0, np.array([position]))
        chosen: list[int] = []
        for word in np.argsort(random_bits(keys, 0, len(words))[0]).tolist():
            if len(chosen) < max(1, len(words) // _WORDS_PER_BLANK) and not {word - 1, word + 1} & set(chosen):
                chosen.append(word)
        marks = ("<mask>" if masks else f"<extra_id_{blank}>" for blank in itertools.count())
        blanked, end = "", 0
        for word in sorted(chosen):
            blanked += sentence[end : words[word].start()] + next(marks)
            end = words[word].end()
        found.append((blanked + sentence[end:], sentence))
    return found


def can_blank_out(tokenizer: Tokenizer) -> bool:
    """True if the tokenizer has sentinels or a mask token."""
    return tokenizer.sentinels > 0 or tokenizer.vocabulary.mask is not None


def beginnings(corpus: Corpus, number: int) -> list[tuple[str, str]]:
    """Pairs (first half of a sentence, sentence) from the first `number` suitable held-out documents."""
    sentences = itertools.islice(_held_out_sentences(corpus), number)
    return [(" ".join(words[: len(words) // 2]), sentence) for sentence in sentences if (words := sentence.split())]


def held_out_documents(corpus: Corpus, *columns: str) -> Iterator[Any]:
    """The held-out documents of `corpus`, with these `columns`; none if the copy has no documents."""
    for document in all_documents(open_store(corpus.location), *columns, "split"):
        if document.split == "validation":
            yield document


def _held_out_sentences(corpus: Corpus) -> Iterator[str]:
    """The first sentence of medium length in each held-out document."""
    for document in held_out_documents(corpus, "text"):
        for sentence in re.split(r"(?<=[.!?])\s+", document.text):
            if len(sentence.split()) in _LENGTHS and sentence[0].isupper() and sentence.endswith("."):
                yield sentence
                break


class Filling(NamedTuple):
    """A filling of a masked span, and its probability under the model."""

    text: str
    probability: float


@torch.no_grad()
def likeliest_fillings(trained: TrainedModel, text: str, number: int) -> list[list[Filling]]:
    """For each `<extra_id_k>` of `text`, the `number` likeliest fillings of up to 8 tokens, by beam search.

    A filling's probability counts its tokens and its end, another sentinel or EOS. If several sequences of tokens
    decode to the same text, the likeliest is the filling. Earlier spans have their likeliest fillings. Raises UserError
    for a model that doesn't fill spans.
    """
    model, tokenizer = trained.model, trained.tokenizer
    if not isinstance(model, EncoderDecoder):
        raise UserError(f"models of the family {model.config.family} don't fill masked spans")
    sentinels = tokenizer.vocabulary.sentinel_ids
    device = next(model.parameters()).device
    inputs = input_ids(trained, text)
    states = model.encode(torch.tensor([inputs], device=device))
    prefix = [model.config.decoder_start_id]
    blanks = []
    for blank in (id_ for id_ in inputs if id_ in sentinels):
        prefix = [*prefix, blank]
        found = _search(model, tokenizer, states, torch.tensor([prefix], device=device), number)
        blanks.append([Filling(text, probability) for text, (probability, _) in found])
        prefix = [*prefix, *found[0][1][1]]
    return blanks


def _search(
    model: EncoderDecoder, tokenizer: Tokenizer, states: Tensor, prefix: Tensor, number: int
) -> list[tuple[str, tuple[float, list[int]]]]:
    """(text, (probability, ids)) of the `number` likeliest spans after `prefix` (1, length), the likeliest first."""
    vocabulary = tokenizer.vocabulary
    marks = torch.tensor([vocabulary.pad, vocabulary.eos, *vocabulary.sentinel_ids], device=states.device)
    tokens = prefix
    running = torch.ones(1, dtype=torch.float64, device=states.device)
    by_text: dict[str, tuple[float, list[int]]] = {}
    for _ in range(_LONGEST + 1):
        logits = model.decode(tokens, states.expand(len(tokens), -1, -1))[:, -1]
        shares = logits.double().softmax(dim=-1)[:, : model.config.vocab_size] * running[:, None]
        ended = shares[:, marks[1:]].sum(dim=1).tolist()
        spans = tokens[:, prefix.size(1) :].tolist()
        for span, probability in zip(spans, ended, strict=True):
            text = tokenizer.decode(span).strip()
            by_text[text] = max(by_text.get(text, (0.0, [])), (probability, span))
        finished = sorted(by_text.items(), key=itemgetter(1), reverse=True)[:number]
        shares[:, marks] = 0.0
        running, best = shares.flatten().topk(min(_WIDTH * number, shares.numel()))
        if len(finished) == number and running[0] <= finished[-1][1][0]:
            break
        rows = best // shares.size(1)
        tokens = torch.cat([tokens[rows], (best % shares.size(1))[:, None]], dim=1)
    return finished
