"""The text that every script trains on: long lines of the shipped sample of C4, each with its number."""

import gzip
import json
from pathlib import Path

SAMPLE = Path(__file__).parents[2] / "data_pipeline/samples/c4-train.00000-of-01024-first1000.json.gz"
LENGTH = 32  # bytes of inputs, and of targets
VOCABULARY = 384  # of ByT5: 3 special ids, 256 bytes, and ids that stay unused
PAD = 0


def write(path: Path) -> None:
    """Writes the lines of the sample that fill a row, as {"row": number, "text": line}."""
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as sample:
        lines = [line for document in sample for line in json.loads(document)["text"].split("\n")]
    long = dict.fromkeys(line for line in lines if len(line.encode()) >= 2 * LENGTH)
    rows = [json.dumps({"row": number, "text": line}) for number, line in enumerate(long)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def tokens(text: str) -> list[int]:
    """The ids of the first bytes of a line: `LENGTH` of inputs, and as many of targets."""
    return [byte + 3 for byte in text.encode()[: 2 * LENGTH]]


def pair(example: dict[str, str]) -> dict[str, list[int]]:
    """An example for an encoder-decoder: the beginning of a line, and how the line continues."""
    ids = tokens(example["text"])
    return {"input_ids": ids[:LENGTH], "labels": ids[LENGTH:]}
