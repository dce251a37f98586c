"""The way of a training step through the code."""

import re

import pytest

from checks.walk import PACKAGES, ROOT, files, walk
from tests.support.runs import run_file

FILES, FUNCTIONS, MODULES = 30, 165, 130  # the most


@pytest.fixture(scope="module")
def found(small_corpus, tmp_path_factory):
    """A step that logs, saves and evaluates nothing."""
    folder = tmp_path_factory.mktemp("walk")
    path = run_file(folder, small_corpus, stage=1, checkpoint={"every_steps": 100}, tracking={"mlflow": None})
    return walk(str(path), [], step=6)


def test_a_steady_step_runs_few_files_and_functions(found):
    assert "pretrain/training/trainer.py" in files(found)
    assert len(files(found)) <= FILES, "\n".join(files(found))
    assert len(found["calls"]) <= FUNCTIONS, "\n".join(f"{file}: {name}" for file, name, _ in found["calls"])


def test_a_run_has_loaded_few_modules_of_this_project(found):
    own = [name for name in found["loaded"] if name.split(".")[0] in PACKAGES]
    assert len(own) <= MODULES, "\n".join(own)


def test_the_page_of_the_engine_lists_the_files_of_a_step_in_their_order(found):
    """The first two run before it, and the family is that of the run."""
    page = (ROOT / "docs/explanation/engine.md").read_text().partition("## The way of a step")[2]
    listed = re.findall(r"(?m)^\| `(\S+\.py)` \|", page.partition("\n## ")[0])
    assert len(listed) == 10
    assert all((ROOT / file).exists() for file in listed)
    assert set(listed[2:]) <= set(files(found))


def test_training_loads_nothing_that_builds_corpora_no_other_kinds_and_no_compiler_that_it_does_not_use(found):
    building = ("data_pipeline.sources", "data_pipeline.dedup", "data_pipeline.engine", "data_pipeline.stages")
    assert [name for name in found["loaded"] if name.startswith((*building, "torch._inductor.compile_fx"))] == []
    others = ("corpus.objectives.ul2", "corpus.tokenizer.byt5", "config.optimizers.muon", "cli.generate")
    assert [name for name in found["loaded"] if name.endswith(others)] == []
    assert "deepspeed.runtime.zero.muon.original_muon" in found["loaded"]  # its import would load the compiler


def test_a_run_has_imported_objects_searched_for_garbage_no_more(found):
    assert found["frozen"] > 100_000
