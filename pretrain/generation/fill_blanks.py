"""Blanks out words of held-out sentences, which a model fills to show what it has learnt."""

import itertools
import re
from collections.abc import Iterator

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.execution.parts import read_documents
from data_pipeline.foundation.errors import UserError
from data_pipeline.objectives import Padded, SpanCorruption
from data_pipeline.objectives.randomness import row_keys
from data_pipeline.tokenizer import Tokenizer

_WORDS = range(10, 25)


def blank_out(corpus: Corpus, tokenizer: Tokenizer, number: int, seed: int) -> list[tuple[str, str]]:
    """Pairs (sentence with <extra_id_k> for blanks, sentence) from the first `number` suitable held-out documents."""
    if not tokenizer.sentinels:
        raise UserError("--corpus: blanks need sentinels, but the model's tokenizer has none")
    found: list[tuple[str, str]] = []
    blanks = corpus.objective if isinstance(corpus.objective, SpanCorruption) else SpanCorruption()
    for position, sentence in enumerate(_held_out_sentences(corpus)):
        if len(found) == number:
            break
        row = Padded.full(np.array(tokenizer.encode([sentence]), dtype=np.int64))
        keys = row_keys(seed, "blanks", 0, np.array([position]))
        examples = blanks.apply(row, keys, tokenizer.vocabulary, {})
        found.append((tokenizer.decode(examples.inputs.values[0]), sentence))
    return found


def beginnings(corpus: Corpus, number: int) -> list[tuple[str, str]]:
    """Pairs (first half of a sentence, sentence) from the first `number` suitable held-out documents."""
    sentences = itertools.islice(_held_out_sentences(corpus), number)
    return [(" ".join(words[: len(words) // 2]), sentence) for sentence in sentences if (words := sentence.split())]


def _held_out_sentences(corpus: Corpus) -> Iterator[str]:
    """The first sentence of medium length in each held-out document."""
    for part in sorted((corpus.directory / "documents").glob("part-*.parquet")):
        for document in read_documents(corpus.directory, f"documents/{part.name}", ["text", "split"]):
            if document["split"] != "validation":
                continue
            for sentence in re.split(r"(?<=[.!?])\s+", document["text"]):
                if len(sentence.split()) in _WORDS and sentence[0].isupper() and sentence.endswith("."):
                    yield sentence
                    break
