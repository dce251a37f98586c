"""Sequences are drawn by the probabilities of a profile; masked residues are compared with counts; the page's files
and lines for own sequences work."""

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.symbols import Symbols
from examples.recipes.masked_spans import Masked
from examples.recipes.proteins import RESIDUES, Neighbours, Profile, drawn, write_data
from pretrain.config import RunConfig
from pretrain.export import export
from tests.support.exported import randomise
from tests.support.small_models import as_at_the_start

PAGE = (Path(__file__).parents[3] / "docs/results/proteins.md").read_text(encoding="utf-8")
STRAIGHT = [1, 0, 0, 1, 0, 1, 0]  # from match to match, and from an insertion or a deletion back


def profile_of(consensus, **rows):
    """A profile of one residue a column; `rows` changes transitions, by `row_COLUMN`."""
    match = np.eye(20)[[RESIDUES.index(residue) for residue in consensus]]
    transitions = np.array([STRAIGHT] * (len(consensus) + 1), dtype=float)
    for name, row in rows.items():
        transitions[int(name.removeprefix("row_"))] = row
    return Profile("PF", match, np.eye(20)[[RESIDUES.index("W")] * len(consensus)], transitions)


def test_a_profile_without_choices_draws_its_consensus():
    assert profile_of("MKTAY").draw(Random(0)) == ("MKTAY", [0, 1, 2, 3, 4])


def test_insertions_and_deletions_are_those_of_the_transitions():
    inserting = profile_of("MKT", row_2=[0, 1, 0, 1, 0, 1, 0])
    assert inserting.draw(Random(0)) == ("MKWT", [0, 1, -1, 2])
    deleting = profile_of("MKT", row_1=[0, 0, 1, 1, 0, 1, 0])
    assert deleting.draw(Random(0)) == ("MT", [0, 2])
    skipping = profile_of("MKT", row_1=[0, 0, 1, 1, 0, 1, 0], row_2=[1, 0, 0, 1, 0, 0, 1])
    assert skipping.draw(Random(0)) == ("M", [0])


def test_residues_are_as_frequent_as_their_column_says():
    match = np.full((1, 20), 0.5 / 19)
    match[0, RESIDUES.index("G")] = 0.5
    profile = Profile("PF", match, match, np.array([STRAIGHT] * 2, dtype=float))
    counts = Counter(profile.draw(Random(number))[0] for number in range(2000))
    assert counts["G"] == pytest.approx(1000, abs=5 * (2000 * 0.25) ** 0.5)
    assert profile.likeliest(0) == "G"
    assert profile.likeliest(-1) == "L"


def test_a_sequence_depends_on_the_seed_the_family_and_its_number_alone():
    profile = Profile("PF", np.full((9, 20), 0.05), np.full((9, 20), 0.05), np.array([STRAIGHT] * 10, dtype=float))
    five, three = ([one.residues for one in drawn(profile, number, 0, "train")] for number in (5, 3))
    assert five[:3] == three
    assert len({*five}) == 5
    assert five != [one.residues for one in drawn(profile, 5, 1, "train")]
    assert not {*five} & {one.residues for one in drawn(profile, 5, 0, "held-out")}


def test_the_files_have_the_trained_families_and_the_test_the_others_too(tmp_path):
    write_data(tmp_path / "data", [profile_of("MKTAY")], [profile_of("GGW")], sequences=2, seed=0, tested=1)
    assert (tmp_path / "data/train.fasta").read_text() == ">PF/train/0\nMKTAY\n>PF/train/1\nMKTAY\n"
    test = [json.loads(line) for line in (tmp_path / "data/test.jsonl").read_text().splitlines()]
    assert [(one["seen"], one["residues"], one["likeliest"]) for one in test] == [
        (True, "MKTAY", "MKTAY"),
        (False, "GGW", "GGW"),
    ]
    with pytest.raises(UserError, match="exists"):
        write_data(tmp_path / "data", [], [], sequences=2, seed=0)


def test_the_residue_between_two_others_is_the_most_frequent_there():
    neighbours = Neighbours(["MKTA", "MKTG", "MRTA", "KK"])
    assert neighbours.around(Masked("M", "?", "TT")) == "K"
    assert neighbours.around(Masked("", "?", "KTA")) == "M"
    assert neighbours.around(Masked("W", "?", "W")) == "K"  # never seen: the most frequent of all


def test_the_files_for_own_sequences_load_and_fit_each_other(tmp_path):
    for block, name in re.findall(r"```yaml\n(# (\S+)\n.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(block)
    corpus = load(tmp_path / "mine.corpus.yaml", [], CorpusConfig)
    run = load(tmp_path / "mine.run.yaml", [], RunConfig)
    (source,) = corpus.sources
    assert (source.path, source.split, corpus.split.validation_fraction) == ("mine.fasta", None, 0.01)
    assert run.data.train[0].corpus == run.data.validation[0].corpus == corpus.output
    assert corpus.rows.objective.raw_length == 512
    assert run.model.longest_sequence == max(corpus.rows.objective.shape)
    assert run.model.widening == 4


def test_vectors_of_residues_are_the_encoders_states_without_bos_and_eos(tmp_path, monkeypatch):
    """By the lines of the page, from an export, beside this project's encoder."""
    tokenizer = Tokenizer(Symbols(".", RESIDUES), ["<mask>", "<s>"])
    model = randomise(as_at_the_start("bart", vocab_size=tokenizer.size, pad_id=0, eos_id=1))
    export(model.state_dict(), model.config, tokenizer, tmp_path / "exports/mine")
    monkeypatch.chdir(tmp_path)
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(lines, found)
    for sequence, vectors, mean in zip(["MKTAYIAKQR", "GDSGG"], found["residues"], found["means"], strict=True):
        ids = torch.tensor([[tokenizer.vocabulary.bos, *tokenizer.encode([sequence])[0], tokenizer.vocabulary.eos]])
        with torch.no_grad():
            expected = model.encode(ids, torch.ones_like(ids))[0, 1:-1]
        torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(mean, expected.mean(dim=0), rtol=0, atol=1e-4)
