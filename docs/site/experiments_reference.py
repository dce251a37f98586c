"""Prints the page docs/reference/experiments.md: every key of experiment.yaml."""

from docs.site.settings_reference import file_parts
from pretrain.tools.experiment.experiment_folder import ExperimentFile

_INTRODUCTION = """\
# Experiments

Every key of the experiment.yaml of [an experiment](../how-to/compare-runs.md), printed from the code by `python -m
docs.site.experiments_reference`."""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n\n".join([_INTRODUCTION, *map(str, file_parts("Experiment files", ExperimentFile))]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
