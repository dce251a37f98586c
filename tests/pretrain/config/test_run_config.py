"""Sections of a run file."""

from data_pipeline.base.config_file import load
from pretrain.config.run_config import DataSection


def test_another_objective_in_the_row_starts_afresh(tmp_path):
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text("train: [{corpus: c}]\nobjective: {name: in_one_row, of: {name: prefix_lm, length: 30}}")
    child.write_text("extends: base.yaml\nobjective: {of: {name: text_to_text, targets_length: 9}}")
    objective = load(child, [], DataSection).objective
    assert (objective.of.name, objective.of.targets_length, objective.of.inputs_length) == ("text_to_text", 9, 512)
