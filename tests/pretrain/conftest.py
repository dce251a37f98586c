"""Fixtures that several tests of training share."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sentencepiece
import torch.distributed as dist

from pretrain.training.tracking.mlflow_store import create_tables
from tests.conftest import TOP, made_once
from tests.support.checkpoint_runs import OPTIMIZERS, trained


@pytest.fixture(scope="session")
def whole(small_corpus) -> Path:
    """Uninterrupted runs of one rank at stage 1, one with each optimizer."""

    def make(folder: Path) -> None:
        assert trained(1, folder, small_corpus, 1, None) == [[0] * len(OPTIMIZERS)]

    return made_once("whole", make)


@pytest.fixture
def finished(whole, tmp_path) -> Path:
    """The run file of a copy of the finished AdamW run, in another place; the run has four checkpoints."""
    shutil.copytree(whole / "adamw", tmp_path / "adamw")
    path = tmp_path / "adamw/run.yaml"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "run": {**content["run"], "directory": str(tmp_path / "adamw/run")}}))
    return path


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process is the only rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def spiece(tmp_path_factory) -> Path:
    """T5's kind of tokenizer, of 300 pieces, trained on the licence's text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        input=str(TOP / "LICENSE"),
        model_prefix=str(folder / "spiece"),
        vocab_size=300,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return folder / "spiece.model"


@pytest.fixture(scope="session")
def empty_mlflow() -> Callable[[Path], str]:
    """Puts MLflow's database without runs into a folder, and returns its URI: creating the tables takes seconds."""

    def make(folder: Path) -> None:
        create_tables(f"sqlite:///{folder}/mlflow.db")

    database = made_once("mlflow", make) / "mlflow.db"

    def put(folder: Path) -> str:
        shutil.copy(database, folder)
        return f"sqlite:///{folder}/mlflow.db"

    return put


@pytest.fixture(scope="module")
def uri(tmp_path_factory, empty_mlflow) -> str:
    """Of an MLflow that a module's tests share."""
    return empty_mlflow(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture(scope="module")
def modules_of_transformers(tmp_path_factory):
    """The folder into which transformers copies code from a directory; transformers reads the setting when imported.

    Python finds all such code in the first folder of a process unless it forgets that.
    """
    dynamic_module_utils = pytest.importorskip("transformers.dynamic_module_utils")
    before, path = dynamic_module_utils.HF_MODULES_CACHE, list(sys.path)
    dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
    yield
    dynamic_module_utils.HF_MODULES_CACHE, sys.path[:] = before, path
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
