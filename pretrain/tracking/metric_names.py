"""The names of metrics in MLflow.

MLflow's page of a run sorts its sections by name, and a section is all of a name before its last slash. So losses come
first, then evaluations, and seconds and sizes last; each name of metrics.jsonl is taken apart by the first pattern that
fits it.
"""

import re

from pretrain.tracking.store import safe_key

_NAMES = [
    (r"train/loss", "loss/train"),
    (r"train/(\w+_loss|cross_entropy)", r"loss/train.\1"),
    (r"validation/(.+)/loss", r"loss/validation.\1"),
    (r"validation/(.+)/(\w+_loss|unigram_entropy)", r"loss/validation.\1.\2"),
    (r"validation/(.+)/(\w+)", r"metrics/\1.\2"),
    (r"evaluation/(.+)/seconds", r"usage/evaluation.\1.seconds"),
    (r"checkpoint/(\w+)", r"usage/checkpoint.\1"),
    (r"stragglers/(\w+)", r"usage/stragglers.\1"),
    (r"train/(peak_memory_gigabytes)", r"usage/\1"),
    (r"((?:train|system)/.+)", r"\1"),
    (r"((?:embedding|norms)/.+)", r"model/\1"),
    (r"(.+/.+)", r"metrics/\1"),
]


def in_mlflow(name: str) -> str:
    """The name in MLflow of a metric of metrics.jsonl: "validation/c4/loss" -> "loss/validation.c4"."""
    for pattern, replacement in _NAMES:
        if found := re.fullmatch(pattern, name):
            return safe_key(found.expand(replacement))
    return safe_key(name)
