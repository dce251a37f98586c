"""The picture of a run: which of its metrics it shows."""

import pytest

from pretrain.run.metrics_file import MetricLog
from pretrain.trainer import picture
from tests.tables import each

VALIDATION = {"validation/small/text_loss": 4.29, "validation/small/unigram_entropy": 5.46}
INPUT_USE = {
    "input_use/small/loss": 4.33,
    "input_use/small/other_input_loss": 6.68,
    "input_use/small/unigram_entropy": 5.38,
    "input_use/small/bigram_entropy": 5.71,
}


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
    picture.draw(tmp_path, tmp_path / "picture.png", attention=False)
    (axes,) = figures[0].axes
    assert {line.get_label(): pytest.approx(line.get_ydata()[-1]) for line in axes.lines} == shown
