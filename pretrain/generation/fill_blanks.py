"""Blanks out words of held-out sentences, which a model fills to show what it has learnt."""

import itertools
import re
from collections.abc import Iterator

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.execution.parts import read_documents
from data_pipeline.foundation.errors import UserError
from data_pipeline.objectives import Denoising, Objective, Padded, SpanCorruption
from data_pipeline.objectives.randomness import row_keys
from data_pipeline.tokenizer import Tokenizer

_WORDS = range(10, 25)


def blank_out(corpus: Corpus, tokenizer: Tokenizer, number: int, seed: int) -> list[tuple[str, str]]:
    """Pairs (sentence with blanks, sentence) from the first `number` suitable held-out documents.

    Blanks are <extra_id_k>, or <mask> if the tokenizer has no sentinels. Raises UserError if it has no mask either.
    """
    blanks = _blanks(corpus.objective, tokenizer)
    if blanks is None:
        raise UserError("--corpus: blanks need sentinels or a mask, but the model's tokenizer has neither")
    found: list[tuple[str, str]] = []
    for position, sentence in enumerate(_held_out_sentences(corpus)):
        if len(found) == number:
            break
        row = Padded.full(np.array(tokenizer.encode([sentence]), dtype=np.int64))
        keys = row_keys(seed, "blanks", 0, np.array([position]))
        examples = blanks.apply(row, keys, tokenizer.vocabulary, {})
        ids = [id_ for id_ in examples.inputs.values[0].tolist() if id_ != tokenizer.vocabulary.bos]
        found.append((tokenizer.decode(ids), sentence))
    return found


def can_blank_out(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has a token for a blank."""
    return tokenizer.sentinels > 0 or tokenizer.vocabulary.mask is not None


def _blanks(objective: Objective, tokenizer: Tokenizer) -> Objective | None:
    """What makes blanks: the corpus's own noise if it does, without what would change other words."""
    if tokenizer.sentinels:
        return objective if isinstance(objective, SpanCorruption) else SpanCorruption()
    if tokenizer.vocabulary.mask is None:
        return None
    own = objective if isinstance(objective, Denoising) else Denoising()
    only_masks = {"random_ratio": 0.0, "insert_ratio": 0.0, "permute_sentence_ratio": 0.0, "rotate_probability": 0.0}
    return own.model_copy(update=only_masks)


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
                if len(sentence.split()) in _WORDS and sentence[0].isupper() and sentence.endswith("."):
                    yield sentence
                    break
