"""A fastText model written by hand, whose probabilities follow from a formula."""

import struct
from pathlib import Path

import numpy as np

MAGIC, VERSION, SUPERVISED, SOFTMAX = 793_712_314, 12, 3, 3
LABELS = ("__label__good", "__label__bad")
WORDS = ("</s>", "river", "casino")
VECTORS = np.array([[0, 0], [1, 0], [0, 1]], dtype="<f4")
OUTPUTS = np.array([[4, -4], [-4, 4]], dtype="<f4")


def write_model(path: Path, labels=LABELS, kind=SUPERVISED, outputs=OUTPUTS) -> Path:
    """A page with r times "river", c times "casino" and n words and an EOS token in all that the model knows is "good"
    with probability 1 / (1 + exp(-8 (r - c) / n))."""
    entries = [(word, 0) for word in WORDS] + [(label, 1) for label in labels]
    settings = [VECTORS.shape[1], 5, 5, 1, 5, 1, SOFTMAX, kind, 0, 0, 0, 100]
    content = struct.pack("<2i12id", MAGIC, VERSION, *settings, 1e-4)
    content += struct.pack("<3i2q", len(entries), len(WORDS), len(labels), 100, -1)
    content += b"".join(name.encode() + b"\0" + struct.pack("<qb", 5, type_) for name, type_ in entries)
    for matrix in (VECTORS, outputs):
        content += struct.pack("<?2q", False, *matrix.shape) + matrix.tobytes()
    path.write_bytes(content)
    return path
