"""A small corpus of real text, built once by the real pipeline, and helpers to run the commands as users do."""

import gzip
import hashlib
import itertools
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import data_pipeline
from data_pipeline.base.atomic import lock
from data_pipeline.base.packages import git
from tests.support.in_process import done_here

# The same examples each time, however long one takes: it may load a library first, and others share the cores.
slow_examples = [HealthCheck.too_slow]
settings.register_profile("suite", derandomize=True, deadline=None, database=None, suppress_health_check=slow_examples)
settings.load_profile("suite")

# Two threads mostly wait for each other over a tiny model, on a busy machine for seconds.
os.environ["OMP_NUM_THREADS"] = "1"
# PyTorch's own loops give the same bits on all machines with these instructions.
os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
# Else oneDNN, which asks the processor itself, has PyTorch pack bf16 for AMX, and those loops refuse to.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
# Ranks are on the CPU also on a machine with GPUs; what needs a GPU is in checks/gpu.
os.environ["DS_ACCELERATOR"] = "cpu"
# A shell starts what it puts into the background with Ctrl-C ignored, and tests send it to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Each of the hundreds of processes that tests start would compile this project's modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TOP = Path(__file__).parent.parent
CODE = ("data_pipeline", "pretrain", "launch", "configs", "tests")
DATA = Path(__file__).parent / "data"
SAMPLES = Path(data_pipeline.__file__).parent / "samples"
C4_SAMPLE = SAMPLES / "c4-train.00000-of-01024-first1000.json.gz"


# The files that take longest begin first, so that at the end no worker is left alone with one of them. The first three
# need one corpus at most: workers would wait for the one that builds it.
LONGEST = [
    "launch/test_hosts.py",
    "launch/test_slurm.py",
    "pretrain/models/test_layers.py",
    "data_pipeline/engine/test_cluster.py",
    "data_pipeline/stages/test_builds_in_a_bucket.py",
    "launch/test_slurm_chain.py",
    "launch/test_supervision.py",
    "checks/test_fault_matrix.py",
    "checks/test_killed_builds.py",
    "checks/test_gpu_checks.py",
    "test_tutorials.py",
    "../examples/fault_hunting/tests/test_silent_corruption.py",
    "../examples/fault_hunting/tests/test_stragglers.py",
    "../examples/distillation/tests/test_distillation.py",
    "../examples/diagnostics/tests/test_norms.py",
    "pretrain/models/test_kernels.py",
    "pretrain/models/test_families.py",
    "pretrain/tools/test_plan.py",
    "pretrain/engine/test_checkpoints.py",
    "pretrain/engine/test_optimizers.py",
    "pretrain/engine/test_construction.py",
    "pretrain/training/test_run.py",
    "pretrain/evaluate/test_hooks.py",
    "pretrain/training/callbacks/test_callbacks.py",
    "pretrain/training/test_tracking.py",
    "pretrain/engine/test_update_passes.py",
    "pretrain/evaluate/test_text_to_text.py",
    "pretrain/engine/test_numerics.py",
    "launch/tools/test_doctor.py",
    "pretrain/training/callbacks/test_bad_steps.py",
    "pretrain/training/test_micro_batch.py",
    "pretrain/evaluate/test_lm_eval.py",
    "pretrain/tools/test_experiment.py",
]


DEVICES = ("cpu", "cuda")
DAY = 86_400  # seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=DEVICES, help="run the tests that take a device, on this one, and no others")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out of `make test`; `make test SLOW=1` runs it")
    config.addinivalue_line("markers", "timing: asks how fast the machine is; `make timing` runs it, CI does not")
    config.addinivalue_line("markers", "soak: minutes for what quicker tests see in another form; `make soak` runs it")
    config.addinivalue_line("markers", "on_device: runs on each device that is here; `--device` selects these tests")
    for folder in MADE.parent.glob("*"):
        if time.time() - folder.stat().st_mtime > DAY:
            shutil.rmtree(folder, ignore_errors=True)  # of other code
    if "PYTEST_XDIST_WORKER" in os.environ:
        import tests.support.rank_processes  # noqa: F401  says what the server imports

        # Before a loader of a test does: the server that ranks are forked from would then have none of their imports.
        forkserver.ensure_running()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Every fixture and every test draws the same numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # what draws without a generator of its own
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


pytest_fixture_setup = pytest_runtest_call


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test with the argument `device`, unless it sets that itself, on the CPU and, where there is one, a GPU."""
    own = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "device" not in metafunc.fixturenames or any("device" in names for names in own):
        return
    import torch  # takes seconds, which most folders of tests don't need

    chosen = metafunc.config.getoption("device")
    here = DEVICES if torch.cuda.is_available() else DEVICES[:1]
    values = [pytest.param(name, marks=pytest.mark.on_device) for name in ([chosen] if chosen else here)]
    metafunc.parametrize("device", values, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("device"):
        without = [item for item in items if item.get_closest_marker("on_device") is None]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
    places = {(Path(__file__).parent / name).resolve(): place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one of this project's commands in a process of its own, as a user does."""
    name, *arguments = map(str, command)
    program = [str(Path(sys.executable).with_name(name)), *arguments]
    return subprocess.run(program, cwd=cwd, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})


def write_c4(path: Path, records: int, skip: int = 0) -> None:
    """Writes some of the shipped C4 records to a file in the published layout."""
    with gzip.open(C4_SAMPLE, "rt", encoding="utf-8") as lines, gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(itertools.islice(lines, skip, skip + records))


def write_corpus_file(path: Path, **changes: object) -> Path:
    """Writes a corpus file whose source is the C4 files beside it."""
    config = {
        "name": "small",
        "output": str(path.parent / "corpus"),
        "sources": [{"format": "c4", "path": str(path.parent / "*.json.gz"), "language": "en"}],
        "cleaning": {"profile": "none"},
        "dedup": {"urls": None, "lines": False, "documents": False},
        "split": {"validation_fraction": 0.05},
        # room for pieces of several letters
        "tokenizer": {"vocab_size": 500, "byte_fallback": False, "character_coverage": 0.9995, "sentinels": 20},
        "rows": {"objective": {"name": "span_corruption", "inputs_length": 32}},
        "shards": {"rows_per_block": 64, "blocks_per_shard": 8},
        "bytes_per_shared_unit": 0,  # a few small files become several units, as large ones do
        **changes,
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def _of_this_code() -> str:
    """A name that changes with any file that what tests make depends on, and the commit, which manifests have."""
    files = [path for folder in CODE for path in (TOP / folder).rglob("*") if path.suffix != ".pyc" and path.is_file()]
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((git("rev-parse", "HEAD"), sorted(facts))).encode()).hexdigest()[:16]


MADE = Path(
    os.environ.get("TESTS_MADE") or TOP / "build/tests/made" / _of_this_code()
)  # checks/mutation chooses another


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A directory that `make` fills. One worker makes it, and all read it, as do later runs of the same code."""
    MADE.mkdir(parents=True, exist_ok=True)
    folder, made = MADE / name, MADE / f"{name}.made"
    with (MADE / f"{name}.lock").open("w") as file:
        lock(file, None, wait=True)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # another worker has failed to make it
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def built_once(name: str, parts: int = 3, **changes: object) -> Path:
    """The directory of a finished corpus of so many input files."""

    def make(folder: Path) -> None:
        for part in range(parts):
            write_c4(folder / f"c4-{part}.json.gz", records=60, skip=60 * part)
        done_here("data-pipeline", "build", write_corpus_file(folder / "corpus.yaml", **changes))

    return made_once(name, make) / "corpus"


@pytest.fixture(scope="session")
def small_corpus() -> Path:
    """The directory of a finished corpus: 3 input files, noise applied at load."""
    return built_once("small")


@pytest.fixture(scope="session")
def corpus_built_with_noise() -> Path:
    """The same corpus with span corruption applied at build."""
    rows = {"objective": {"name": "span_corruption", "inputs_length": 32}, "apply_at": "build"}
    return built_once("built_with_noise", rows=rows)


@pytest.fixture(scope="session")
def byte_level_bpe() -> Path:
    """A directory with two tokenizers: gpt2, GPT-2's files, and bart, BART's as on the Hub, with the ids of fairseq's
    dictionary: <s>, <pad>, </s>, <unk>, then a line for each of GPT-2's tokens, by its id, or a filler; <mask> last."""

    def make(folder: Path) -> None:
        names = ("encoder.json", "vocab.bpe", "dict.txt")
        ids, merges, dictionary = (lzma.decompress((DATA / f"tokenizers/{name}.xz").read_bytes()) for name in names)
        tokens = {str(id_): token for token, id_ in json.loads(ids).items()}
        lines = (tokens.get(line.split()[0], line.split()[0]) for line in dictionary.decode().splitlines())
        order = ["<s>", "<pad>", "</s>", "<unk>", *lines, "<mask>"]
        barts_ids = json.dumps({token: id_ for id_, token in enumerate(order)}).encode()
        for name, content in (("gpt2/encoder.json", ids), ("bart/vocab.json", barts_ids)):
            (folder / name).parent.mkdir()
            (folder / name).write_bytes(content)
        for name in ("gpt2/vocab.bpe", "bart/merges.txt"):
            (folder / name).write_bytes(merges)

    return made_once("byte_level_bpe", make)


@pytest.fixture(scope="session")
def published_tokenizers() -> Path:
    """A directory with one directory for each of `published_tokenizers.KINDS`."""
    from tests.support.published_tokenizers import KINDS, write

    def make(folder: Path) -> None:
        for kind in KINDS:
            write(kind, folder / kind)

    return made_once("published", make)


@pytest.fixture(scope="session")
def bart_corpus(byte_level_bpe) -> Path:
    """The directory of a finished corpus with BART's ids, a special token and sentinels."""
    path = str(byte_level_bpe / "bart")
    tokenizer = {"kind": "tokenizer_json", "path": path, "special_tokens": ["[R]"], "sentinels": 20}
    return built_once("bart", parts=1, tokenizer=tokenizer)
