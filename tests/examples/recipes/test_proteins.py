"""Sequences are drawn by the probabilities of a profile; masked residues are compared with counts."""

import json
from collections import Counter
from random import Random

import numpy as np
import pytest

from data_pipeline.base.errors import UserError
from examples.recipes.masked_spans import Masked
from examples.recipes.proteins import RESIDUES, Neighbours, Profile, drawn, write_data

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
