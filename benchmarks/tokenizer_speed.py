"""How fast does each kind of tokenizer encode and decode, beside the library that others use for it?

    python benchmarks/tokenizer_speed.py [--seconds 4]

The text is the shipped sample of C4, in one batch as a build has it, on one thread. For `ids`, it is the list of the
code points mod 256 of each page, as a build reads it. MB count UTF-8. Vocabularies are made from the same text:
sentencepiece and BPE of 4,000 tokens.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece
from harness import Comparison, Options, Side, Table, compare, main

import data_pipeline
from data_pipeline.corpus.tokenizer.bpe import BPEConfig
from data_pipeline.corpus.tokenizer.byt5 import Bytes
from data_pipeline.corpus.tokenizer.ids import Ids
from data_pipeline.corpus.tokenizer.sentencepiece import MODEL, SentencePieceConfig
from data_pipeline.corpus.tokenizer.symbols import SymbolsConfig
from data_pipeline.corpus.tokenizer.text_model import TextModel

LIMIT = """Sentencepiece and BPE: the libraries themselves, which ours call. Words: the regular expression. Characters,
bytes and ids are looked up in arrays, so the copies of the text limit them."""
SAMPLE = Path(data_pipeline.__file__).parent / "samples/c4-train.00000-of-01024-first1000.json.gz"
TOKENS = 4000
WORDS = r"\s|\w+|[^\w\s]"
SIDES = ("encode", "library's encode", "decode", "library's decode")
COLUMNS = ["kind", "library", *SIDES, "ratio of encoding", "bytes a token"]


def kinds(texts: Sequence[str]) -> dict[str, TextModel]:
    """The model of each kind, made from `texts`."""
    sample = [text.encode() for text in texts]
    identity = SentencePieceConfig(vocab_size=TOKENS, normalization="identity")
    return {
        "sentencepiece": SentencePieceConfig(vocab_size=TOKENS).train(sample),
        "sentencepiece, identity": identity.train(sample),
        "bpe": BPEConfig(vocab_size=TOKENS).train(sample),
        "symbols, characters": SymbolsConfig().train(sample),
        f"symbols, {WORDS}": SymbolsConfig(pattern=WORDS).train(sample),
        "bytes": Bytes(),
        "ids": Ids(256),
    }


def sides_of(model: TextModel, texts: list[str]) -> tuple[str, dict[str, Side]]:
    """The library beside the model, "" if none has the kind, and the work of each side."""
    ids = model.encode(texts)
    sides: dict[str, Side] = {
        "encode": lambda: model.encode_to_arrays(texts),
        "decode": lambda: [model.decode(one) for one in ids],
    }
    if isinstance(model, Ids):
        return "", sides
    if MODEL in model.files:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.files[MODEL])
        sides["library's encode"] = lambda: processor.encode(texts, num_threads=1)
        sides["library's decode"] = lambda: processor.decode(ids, num_threads=1)
        return "sentencepiece", sides
    backend = model.backend()
    sides["library's encode"] = lambda: backend.encode_batch_fast(texts, add_special_tokens=False)
    sides["library's decode"] = lambda: backend.decode_batch(ids)
    return "tokenizers", sides


def measure(options: Options) -> Iterator[Table]:
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    numbers = [" ".join(str(ord(character) % 256) for character in text) for text in texts]
    table = Table("MB a second on one core", COLUMNS)
    for name, model in kinds(texts).items():
        given = numbers if isinstance(model, Ids) else texts
        size, tokens = sum(len(text.encode()) for text in given), sum(map(len, model.encode(given)))
        library, sides = sides_of(model, given)
        found = compare(sides, options)
        ratio = f"{found.ratio(SIDES[1]):.2f}" if library else ""
        speeds = [speed(found, side, size) for side in SIDES]
        table.add(
            f"`{name.replace('|', chr(92) + '|')}`", library, *speeds, ratio, f"{size / tokens:.2f}", **found.data
        )
    yield table


def speed(found: Comparison, side: str, size: int) -> str:
    """MB a second of a side, "" if there is no such side; `size`: of the text, in bytes."""
    if side not in found.times:
        return ""
    return f"{size / 1e6 / found[side].median:,.3g} ± {found[side].spread:.0%}"


if __name__ == "__main__":
    main(__doc__, measure, LIMIT)
