"""muP's check: what stays the same over widths, its verdicts, and the command."""

import json
import math

import pytest
import torch

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from experiments.mup import coordinates_and_transfer as checks
from experiments.mup import run_mup_check as command
from experiments.mup.coordinates_and_transfer import Transfer, Verdict
from experiments.mup.run_mup_check import coordinate_table, mup_check, picture, transfer_table
from experiments.mup.widths import check_widths, default_widths, subject
from pretrain.config import RunConfig
from tests.support.runs import MODEL, run_file
from tests.support.tables import each


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A small T5 on generated tokens."""
    folder = tmp_path_factory.mktemp("mup")
    optimizer = {"learning_rate": 4e-3, "gradient_clipping": 1.0}
    model = {**MODEL, "vocab_size": 200, "init_output_std": 0.5}
    return run_file(folder, folder / "no corpus", model=model, optimizer=optimizer)


def loaded(path, overrides=()):
    run = load(path, list(overrides), RunConfig)
    return subject(run, checks.STEPS), run.optimizer


TIED = ["model.tie_embeddings=true", "model.feed_forward=relu", "model.init_output_std=1.0"]  # T5 1.0's


@pytest.fixture
def fp64():
    """Without muP rounding grows tenfold a step, so that in fp32 the ratios would be those of a processor."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@each("overrides", [[], TIED])
def test_coordinates_stay_with_mup_and_grow_without(checked, overrides, fp64):
    found, optimizer = loaded(checked, overrides)
    widths = [32, 64, 256]
    with_mup, without = (checks.coordinates(found, optimizer, widths, mup) for mup in (True, False))
    verdicts = checks.judged(with_mup, found, optimizer)
    assert {verdict.verdict for verdict in verdicts} <= {"passes", "warns"}, verdicts
    of = {verdict.what: verdict for verdict in checks.judged(without, found, optimizer)}
    assert of["first change of matrices, ∝ 1/m"].verdict == "fails"
    logits = next(verdict for verdict in verdicts if verdict.what == "logits, after 5 steps")
    assert logits.verdict == "passes"
    assert of[logits.what].ratio > 1.5 * logits.ratio
    assert set(with_mup.start) == {"embedding", "attention", "cross-attention", "feed-forward", "layers", "logits"}
    table = coordinate_table(with_mup, without, verdicts, widths)
    assert max(map(len, table.splitlines())) <= 100
    assert len(picture(with_mup, without, Transfer({32: {0: 1.0, 1: 0.5}}), 1e-3).axes) == 3


def test_verdicts_have_their_bounds():
    for values, expected in (([1, 2], "passes"), ([1, 5], "warns"), ([1, 5.1], "fails"), ([1, math.nan], "fails")):
        assert Verdict.from_ratio("", values, checks.PASSES, checks.WARNS).verdict == expected


def test_the_best_rate_is_the_vertex_of_a_parabola():
    def losses(best):
        return {power: 3 + (power - best) ** 2 for power in range(-2, 3)}

    moved = Transfer({64: losses(0.25), 128: losses(-0.25), 256: {**losses(0.0), 2: math.inf}})
    assert [moved.best(width) for width in moved.losses] == pytest.approx([2**0.25, 2**-0.25, 1.0])
    assert moved.verdict().ratio == pytest.approx(2**0.5)
    assert "256" in transfer_table(moved, 1e-3)
    assert Transfer({64: losses(-1.0), 128: losses(1.0)}).verdict().verdict == "warns"
    assert Transfer({64: losses(-1.4), 128: losses(1.4)}).verdict().verdict == "fails"


@pytest.mark.slow
def test_the_command_ends_with_1_if_a_check_fails(checked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checks, "STEPS_OF_TRANSFER", 4)
    monkeypatch.setattr(checks, "SEEDS", (0,))
    measured = {}

    def coordinates(*arguments):
        return measured.setdefault(arguments[-1], checks.coordinates(*arguments))

    monkeypatch.setattr(command, "coordinates", coordinates)
    code = mup_check(checked, [], "16 32 64", tmp_path / "out")
    content = json.loads((tmp_path / "out/mup-check.json").read_text())
    failed = [verdict["what"] for verdict in content["verdicts"] if verdict["verdict"] == "fails"]
    assert code == bool(failed)
    assert not any("change" in what for what in failed)
    assert content["transfer"].keys() == {"16", "32", "64"}
    far = Transfer({16: {0: 1.0, 1: 2.0}, 32: {0: 2.0, 3: 1.0}})
    monkeypatch.setattr(command, "transfer", lambda *_: far)
    monkeypatch.setattr(command, "coordinates", lambda *arguments: measured[arguments[-1]])
    assert mup_check(checked, [], "16 32 64", tmp_path / "out") == 1
    printed = capsys.readouterr().out
    assert "Best rates differ by 8.00×: fails" in printed
    assert "best learning rate over widths" in printed.splitlines()[-1]


def test_widths_that_cannot_be_are_refused_in_a_line_each(checked, tmp_path):
    found, _ = loaded(checked)
    assert default_widths(found.model) == [64, 128, 256, 512]
    with pytest.raises(UserError, match=r"^--widths: 20: num_heads 4 of d_model 32 would be 2\.5$"):
        check_widths(found, [16, 20, 32])
    with pytest.raises(UserError, match="expected three different ones or more"):
        check_widths(found, [16, 32, 32])
    with pytest.raises(UserError, match="expected whole numbers"):
        mup_check(checked, [], "64,wide", tmp_path)
