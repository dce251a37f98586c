"""What each planted fault changes in examples of span corruption."""

from importlib import import_module

import numpy as np
import pytest

from data_pipeline.corpus.objectives.objective import Examples, Padded
from data_pipeline.corpus.objectives.randomness import noise_keys
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.text.vocabulary import Vocabulary
from tests.conftest import TOP

LENGTHS = {"inputs_length": 40, "noise_density": 0.15, "mean_span_length": 3.0}
PAD, EOS, SENTINEL = 0, 1, 9
VOCABULARY = Vocabulary(
    54,
    (10, 54),
    PAD,
    EOS,
    None,
    None,
    None,
    SENTINEL,
    4,
    {},
    word_starts=np.zeros(54, bool),
    sentence_ends=np.zeros(54, bool),
)


def examples(objective: SpanCorruption) -> Examples:
    rows = np.arange(10, 54)[None].repeat(3, axis=0)
    return objective.apply(Padded.full(rows), noise_keys(0, "train", 0, np.arange(3)), VOCABULARY, {})


def tokens(side: Padded) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(side.values, side.lengths, strict=True)]


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.syspath_prepend(str(TOP / "benchmarks/loss_curves"))
    return import_module("planted_faults").Planted


def test_each_fault_changes_what_its_name_says(planted):
    sound = examples(SpanCorruption(**LENGTHS))
    inputs, targets = tokens(sound.inputs), tokens(sound.targets)
    expected = {
        "no_eos": (inputs, [row[:-1] for row in targets]),
        "cut_targets": (inputs, [row[: (len(row) + 1) // 2] for row in targets]),
        "padding_has_a_loss": (inputs, [row + 2 * len(row) * [PAD] for row in targets]),
        "no_input": ([[EOS]] * 3, targets),
    }
    for fault, sides in expected.items():
        objective = planted(fault=fault, **LENGTHS)
        found = examples(objective)
        assert (tokens(found.inputs), tokens(found.targets)) == sides, fault
        assert found.targets.values.shape[1] <= objective.shape[1]
        assert objective.kind_of_batches == "span_corruption"
