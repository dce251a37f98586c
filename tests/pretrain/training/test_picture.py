"""The picture of a run: its curves, and what it says when a model does not read its input."""

import pytest

from data_pipeline.base.errors import UserError
from pretrain.run.metrics_file import MetricLog
from pretrain.training import picture
from tests.support.tables import each

VALIDATION = {"validation/small/text_loss": 4.29, "validation/small/unigram_entropy": 5.46}
INPUT_USE = {
    "input_use/small/loss": 4.33,
    "input_use/small/other_input_loss": 6.68,
    "input_use/small/unigram_entropy": 5.38,
    "input_use/small/bigram_entropy": 5.71,
}


def test_the_picture_says_when_a_model_does_not_read_its_input():
    def at(worth: float, loss: float) -> dict[str, float]:
        return {f"input_use/a/{name}": value for name, value in zip(NAMES, (worth, loss, 5.5), strict=True)}

    NAMES = ("worth", "loss", "unigram_entropy")
    both = "step 20: the model doesn't read its input yet (0.02 nats/token), and has not learnt how frequent tokens are"
    assert picture.verdict("a", {10: at(0.9, 5.0), 20: at(0.02, 6.0)}) == f"{both}: 6.00 > 5.50"
    assert picture.verdict("a", {20: at(0.0, 5.0)}) == "step 20: the model doesn't read its input yet (0.00 nats/token)"
    assert picture.verdict("a", {10: at(0.0, 6.0), 20: at(0.05, 6.0), 30: {"train/loss": 1.0}}) == ""
    assert picture.verdict("b", {20: at(0.0, 5.0)}) == ""


@each("logged, said", [(False, "no metrics.jsonl here; give a run directory"), (True, "no held-out losses; ")])
def test_what_has_no_picture_is_refused(tmp_path, logged, said):
    if logged:
        MetricLog(tmp_path, attempt=1).log(100, {"train/loss": 4.0})
    with pytest.raises(UserError, match=said):
        picture.draw(tmp_path, tmp_path / "picture.png")


@each(
    "metrics, shown",
    [
        (VALIDATION, {"with its input": 4.29, "unigrams": 5.46}),
        (
            VALIDATION | INPUT_USE,
            {"with its input": 4.33, "with another row's input": 6.68, "unigrams": 5.38, "bigrams": 5.71},
        ),
    ],
)
def test_all_curves_are_of_the_same_rows(tmp_path, monkeypatch, metrics, shown):
    MetricLog(tmp_path, attempt=1).log(100, metrics)
    figures = []
    monkeypatch.setattr(picture, "png", lambda figure: figures.append(figure) or b"")
    picture.draw(tmp_path, tmp_path / "picture.png")
    (axes,) = figures[0].axes
    assert {line.get_label(): pytest.approx(line.get_ydata()[-1]) for line in axes.lines} == shown
