"""A small corpus of real text, built once by the real pipeline, and helpers to run the commands as users do."""

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

import data_pipeline

DATA = Path(__file__).parent / "data"
SAMPLES = Path(data_pipeline.__file__).parent / "samples"
C4_SAMPLE = SAMPLES / "c4-train.00000-of-01024-first1000.json.gz"


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one of this project's commands in a process of its own, as a user does."""
    name, *arguments = map(str, command)
    program = [str(Path(sys.executable).with_name(name)), *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(program, cwd=cwd, capture_output=True, text=True, env=environment)


def write_c4(path: Path, records: int, skip: int = 0) -> None:
    """Writes some of the shipped C4 records to a file in the published layout."""
    with gzip.open(C4_SAMPLE, "rt", encoding="utf-8") as lines, gzip.open(path, "wt", encoding="utf-8") as out:
        for number, line in enumerate(lines):
            if skip <= number < skip + records:
                out.write(line)


def write_corpus_file(path: Path, **changes: object) -> Path:
    """Writes a corpus file whose source is the C4 files beside it."""
    config = {
        "name": "small",
        "output": str(path.parent / "corpus"),
        "sources": [{"format": "c4", "path": str(path.parent / "*.json.gz"), "language": "en"}],
        "cleaning": {"profile": "none"},
        "dedup": {"urls": None, "lines": False, "documents": False},
        "split": {"validation_fraction": 0.05},
        "tokenizer": {"vocab_size": 500, "sentinels": 20},
        "rows": {"objective": {"name": "span_corruption", "inputs_length": 32}},
        "shards": {"rows_per_block": 64, "blocks_per_shard": 8},
        **changes,
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory) -> Path:
    """The directory of a finished corpus: 3 input files, noise applied at load."""
    folder = tmp_path_factory.mktemp("small")
    for part in range(3):
        write_c4(folder / f"c4-{part}.json.gz", records=60, skip=60 * part)
    done = run("data-pipeline", "build", write_corpus_file(folder / "corpus.yaml"))
    assert done.returncode == 0, done.stderr
    return folder / "corpus"


@pytest.fixture(scope="session")
def corpus_built_with_noise(small_corpus) -> Path:
    """The same corpus with span corruption applied at build."""
    folder = small_corpus.parent
    objective = {"name": "span_corruption", "inputs_length": 32}
    config = write_corpus_file(
        folder / "built.yaml", output=str(folder / "built"), rows={"objective": objective, "apply_at": "build"}
    )
    done = run("data-pipeline", "build", config)
    assert done.returncode == 0, done.stderr
    return folder / "built"


@pytest.fixture(scope="session")
def byte_level_bpe(tmp_path_factory) -> Path:
    """A directory with two tokenizers: gpt2, GPT-2's files, and bart, the same with fairseq's dictionary."""
    folder = tmp_path_factory.mktemp("byte_level_bpe")
    for kind, names in {
        "gpt2": ("encoder.json", "vocab.bpe"),
        "bart": ("encoder.json", "vocab.bpe", "dict.txt"),
    }.items():
        (folder / kind).mkdir()
        for name in names:
            content = lzma.decompress((DATA / "tokenizers" / f"{name}.xz").read_bytes())
            (folder / kind / name).write_bytes(content)
    return folder


@pytest.fixture(scope="session")
def bart_corpus(byte_level_bpe, tmp_path_factory) -> Path:
    """The directory of a finished corpus with BART's ids, a special token and sentinels."""
    folder = tmp_path_factory.mktemp("bart")
    write_c4(folder / "c4.json.gz", records=60)
    tokenizer = {
        "kind": "byte_level_bpe",
        "path": str(byte_level_bpe / "bart"),
        "special_tokens": ["[R]"],
        "sentinels": 20,
    }
    done = run("data-pipeline", "build", write_corpus_file(folder / "corpus.yaml", tokenizer=tokenizer))
    assert done.returncode == 0, done.stderr
    return folder / "corpus"
