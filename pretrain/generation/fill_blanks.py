"""Blanks out words of held-out sentences, which a model fills to show what it has learnt."""

import itertools
import re
from collections.abc import Iterator

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.execution.parts import read_documents
from data_pipeline.foundation.errors import UserError
from data_pipeline.objectives.denoising import Denoising
from data_pipeline.objectives.randomness import random_bits, row_keys
from data_pipeline.tokenizer import Tokenizer

_LENGTHS = range(10, 25)  # of a sentence, in words
_WORD = re.compile(r"(?<= )[^\W\d_]+(?= )")
_WORDS_PER_BLANK = 7


def blank_out(corpus: Corpus, tokenizer: Tokenizer, number: int, seed: int) -> list[tuple[str, str]]:
    """Pairs (sentence with blanks, sentence) from the first `number` suitable held-out documents.

    A hash of `seed` and of the sentence's number chooses the words to blank out: one in seven of those that have a
    space on each side, and never two neighbours. Blanks are <extra_id_k>, or <mask> if the corpus is for denoising or
    the tokenizer has no sentinels. Raises UserError if it has no mask either.
    """
    if not can_blank_out(tokenizer):
        raise UserError("--corpus: blanks need sentinels or a mask, but the model's tokenizer has neither")
    found = []
    has_mask = tokenizer.vocabulary.mask is not None
    masks = has_mask and (isinstance(corpus.objective, Denoising) or not tokenizer.sentinels)
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
    """True if the tokenizer has a token for a blank."""
    return tokenizer.sentinels > 0 or tokenizer.vocabulary.mask is not None


def beginnings(corpus: Corpus, number: int) -> list[tuple[str, str]]:
    """Pairs (first half of a sentence, sentence) from the first `number` suitable held-out documents."""
    sentences = itertools.islice(_held_out_sentences(corpus), number)
    return [(" ".join(words[: len(words) // 2]), sentence) for sentence in sentences if (words := sentence.split())]


def _held_out_sentences(corpus: Corpus) -> Iterator[str]:
    """The first sentence of medium length in each held-out document."""
    for part in sorted((corpus.directory / "documents").glob("part-*.parquet")):
        for document in read_documents(corpus.directory, f"documents/{part.name}", ["text", "split"]):
            if document.split != "validation":
                continue
            for sentence in re.split(r"(?<=[.!?])\s+", document.text):
                if len(sentence.split()) in _LENGTHS and sentence[0].isupper() and sentence.endswith("."):
                    yield sentence
                    break
