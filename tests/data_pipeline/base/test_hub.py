"""Sources on the Hugging Face Hub: a local server with its API, whose branch moves, and which refuses and is busy."""

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.base import hub as hubs
from data_pipeline.base import stores
from data_pipeline.base.config_file import load
from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.stages import revisions
from data_pipeline.stages.inputs import inputs_of, list_inputs
from launch.tools.scaffold.machine import Machine
from launch.tools.scaffold.text import source_of
from tests.conftest import TOP, write_corpus_file
from tests.support.builds import built, texts_of
from tests.support.hub_server import Hub, Repository, serving
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.tables import each

C4 = "hf://datasets/me/c4/en/*.json.gz"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "_FIRST_PAUSE", 0.01)
        yield from serving(patch)


@pytest.fixture
def hub(server, small_corpus) -> Hub:
    """A Hub with the files of the small corpus."""
    server.calm()
    files = {f"en/{path.name}": path.read_bytes() for path in small_corpus.parent.glob("*.json.gz")}
    server.repositories = {"datasets/me/c4": Repository()}
    server.repositories["datasets/me/c4"].commit({"README.md": b"# C4", ".gitattributes": b"", **files})
    return server


def corpus_file(folder: Path, path: str = C4) -> Path:
    return write_corpus_file(folder / "corpus.yaml", sources=[{"format": "c4", "path": path, "language": "en"}])


def refused(code: int, folder: Path, path: str = C4) -> str:
    return refused_here(code, "data-pipeline", "build", corpus_file(folder, path)).removeprefix("error: ")


@each("page", ["docs/how-to/read-your-text.md", "docs/how-to/recipes.md", "docs/tutorials/t5-on-your-cluster.md"])
def test_the_pages_download_published_c4_with_the_hubs_own_command(hub, page, tmp_path, monkeypatch):
    held_out = "en/c4-validation.00007-of-00008.json.gz"
    names = [held_out, *(f"en/c4-train.{number:05}-of-01024.json.gz" for number in (0, 39, 40))]
    hub.repositories["datasets/allenai/c4"] = Repository()
    hub.repositories["datasets/allenai/c4"].commit({name: name.encode() for name in names})
    (command,) = re.findall(r"^    (hf download [^#\n]*)", (TOP / page).read_text(), re.MULTILINE)
    program, *arguments = shlex.split(command)
    environment = {**os.environ, "HF_HUB_DISABLE_XET": "1"}
    subprocess.run([Path(sys.executable).with_name(program), *arguments], cwd=tmp_path, env=environment, check=True)
    found = {str(path.relative_to(tmp_path / "data/c4")): path.read_bytes() for path in tmp_path.glob("data/c4/en/*")}
    assert found == {name: name.encode() for name in names[:3]}
    monkeypatch.chdir(tmp_path)
    files = inputs_of(load(TOP / "configs/corpora/c4-t5.yaml", [], CorpusConfig)).files
    splits = {f"en/{Path(file.path).name}": file.source.split for file in files}
    assert splits == {held_out: "validation", names[1]: "train", names[2]: "train"}


@each(
    "url, kind, repository, revision, path",
    [
        ("hf://datasets/a/b/c/*.gz", "datasets", "a/b", "main", "c/*.gz"),
        ("hf://datasets/a/b@v1/c", "datasets", "a/b", "v1", "c"),
        ("hf://datasets/a/b@refs/convert/parquet/c", "datasets", "a/b", "refs/convert/parquet", "c"),
        ("hf://datasets/a/b@refs%2Fpr%2F1/c", "datasets", "a/b", "refs/pr/1", "c"),
        ("hf://a/b", "models", "a/b", "main", ""),
    ],
)
def test_a_url_names_a_repository_a_revision_and_a_path(url, kind, repository, revision, path):
    place = hubs.parse(url)
    assert place == hubs.HubPath(kind, repository, revision, path)
    assert hubs.parse(str(place)) == place


def test_evaluation_sets_are_pinned_wherever_the_corpus_file_names_them(server, tmp_path):
    server.calm()
    server.repositories = {"datasets/me/tasks": (repository := Repository())}
    commit = repository.commit({"test.jsonl": b'{"question": "Who?"}'})
    sets = [{"name": "task", "path": "hf://datasets/me/tasks/test.jsonl", "fields": ["question"]}]
    for settings in (
        {"decontamination": {"sets": sets}},
        {"steps": ["documents", {"step": "decontamination", "sets": sets}], "cleaning": None, "dedup": None},
    ):
        sources = [{"format": "c4", "path": str(tmp_path)}]
        config = load(write_corpus_file(tmp_path / "corpus.yaml", sources=sources, **settings), [], CorpusConfig)
        pinned, commits = revisions.pin(config, LocalStore(tmp_path / "corpus"))
        assert pinned.searched_for.sets[0].path == f"hf://datasets/me/tasks@{commit}/test.jsonl"
        assert commits == {"hf://datasets/me/tasks@main": commit}


def test_a_resumed_build_has_the_commit_that_it_began_with(hub, small_corpus, tmp_path):
    """It is the corpus of the same files on a disk, and its manifest and lineage name commit and checksums."""
    repository, file = hub.repositories["datasets/me/c4"], corpus_file(tmp_path)
    begun = repository.branches["main"]
    built(file, until="documents")
    newer = repository.commit({"en/c4-1.json.gz": repository.commits[begun]["en/c4-0.json.gz"]})
    done = run_here("data-pipeline", "build", file)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "are unknown" not in line]
    assert line == (
        f"hf://datasets/me/c4@main has moved; continuing with commit {begun}; "
        f"for the newer one, write hf://datasets/me/c4@{newer} in the path"
    )
    corpus, same = open_corpus(tmp_path / "corpus"), open_corpus(small_corpus)
    assert corpus.fingerprint == same.fingerprint
    assert corpus.manifest.splits == same.manifest.splits
    assert corpus.manifest.config["sources"][0].pop("commits") == {"datasets/me/c4": begun}
    assert corpus.manifest.config == same.manifest.config
    assert corpus.lineage() == same.lineage()
    hub.requests.clear()
    changed = built(file, f"sources.0.path=hf://datasets/me/c4@{newer}/en/*.json.gz", until="documents")
    read = {path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path}
    assert read == {"c4-1.json.gz"}  # the others are the same at both commits
    assert len(texts_of(changed)) < len(texts_of(small_corpus))


@each(
    "path, said",
    [
        ("hf://datasets/me/c4/de/*.json.gz", "/de/*.json.gz: no such file (path of source 'c4')"),
        ("hf://datasets/me/c4/en/c4-9.json.gz", "/en/c4-9.json.gz: no such file (path of source 'c4')"),
        ("hf://datasets/me/c4@v2/en/*", "/c4@v2/en/*: datasets/me/c4 has no revision 'v2'"),
        ("hf://datasets/me/c5/en/*", "/c5@main/en/*: the Hub has no datasets/me/c5, or it is private; for"),
        ("hf://datasets/c4", "hf://datasets/c4: expected hf://datasets/OWNER/NAME/PATH"),
        ("hf://datasets/me/--/x", "/--@main/x: can't be read: "),
    ],
)
def test_paths_that_the_hub_does_not_have_are_named_in_one_line(hub, path, said, tmp_path):
    assert said in refused(2, tmp_path, path)
    assert not (tmp_path / "corpus").exists()


@each(
    "token, gated, said",
    [
        ("hf_old", False, "the Hub refuses the token: "),
        ("", False, "the Hub has no datasets/me/c4, or it is private; for a private one set HF_TOKEN, or run: hf auth"),
        ("hf_reads", True, "datasets/me/c4 is gated: accept its conditions at {}/datasets/me/c4, then set HF_TOKEN"),
    ],
)
def test_a_token_that_may_not_read_is_named_in_one_line(hub, token, gated, said, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    hub.repositories["datasets/me/c4"].private, hub.repositories["datasets/me/c4"].gated = not gated, gated
    line = refused(2, tmp_path)
    assert line.startswith(f"hf://datasets/me/c4@main/en/*.json.gz: {said.format(hub.url)}")
    assert token not in line.replace("hf_reads", "") or not token


def test_a_busy_hub_is_asked_again_and_then_given_up(hub, tmp_path, monkeypatch):
    hub.busy({"/revision/main": 2, "/cdn/": 1})
    corpus = built(corpus_file(tmp_path), until="documents")
    asked = Counter(path for _, path in hub.requests)
    assert asked["/api/datasets/me/c4/revision/main"] == 3
    assert len(texts_of(corpus)) > 100
    hub.busy({"": 1_000})
    monkeypatch.setattr(stores, "LISTING_SECONDS", 0.05)
    unavailable = "hf://datasets/me/c4@main/en/*.json.gz: unavailable for 0 s: "
    line = refused(75, tmp_path)
    assert line.startswith(f"{unavailable}429 Too Many Requests")
    assert line.endswith("; run the same command again later")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port to which everything is thrown away
    assert refused(75, tmp_path).startswith(unavailable)


def test_a_file_whose_bytes_are_not_the_published_ones_is_unreadable_until_they_are(hub, tmp_path):
    def spoilt(content: bytes) -> bytes:
        return content[:-1] + bytes([content[-1] ^ 1])

    whole = texts_of(built(corpus_file(tmp_path), f"output={tmp_path / 'whole'}", until="documents"))
    one = next(iter(hub.large.values()))
    hub.changed = lambda content: spoilt(content) if content == one else content
    done = run_here("data-pipeline", "documents", corpus_file(tmp_path))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert re.search(
        r"^warning: c4/c4-\d.json.gz: unreadable at a place unknown: hf://\S+: its sha256 is \w{64}, but", line
    )
    assert line.endswith("; run the same command again")
    hub.changed = spoilt
    done = run_here("data-pipeline", "documents", corpus_file(tmp_path), f"output={tmp_path / 'none'}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "nothing could be read from source c4"
    hub.calm()
    assert texts_of(built(corpus_file(tmp_path), until="documents")) == whole


@each(
    "below, expected, hidden",
    [
        *((below, ["de/README.md", "en/a.txt"], [".gitattributes", "README.md"]) for below in ("", "/", "/**")),
        ("/de", ["README.md"], []),
        ("/*.md", ["README.md"], []),
        ("/README.md", ["README.md"], []),
    ],
)
def test_the_readme_and_gitattributes_of_a_whole_repository_are_no_inputs(hub, below, expected, hidden):
    hub.repositories["datasets/me/texts"] = Repository()
    content = {name: name.encode() for name in (".gitattributes", "README.md", "de/README.md", "en/a.txt")}
    hub.repositories["datasets/me/texts"].commit(content)
    source = SourceConfig(format="text", path=f"hf://datasets/me/texts{below}")
    found = list_inputs(source)
    assert ([file.name for file in found.files], found.hidden) == (expected, hidden)
    everything = list_inputs(source.model_copy(update={"hidden": True}))
    assert [file.name for file in everything.files] == sorted([*expected, *hidden])


def test_a_dataset_becomes_the_source_of_a_first_corpus(hub, tmp_path, monkeypatch):
    """Of a table the column of text is found. Of many files only some are read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Machine, "this", lambda: Machine(0, "2 cores, no GPU", 200e9, "measured in fp32", "fp32"))
    texts = [f"{number}: a sentence that is longer than its title, and so is the text" for number in range(200)]
    table = pa.table({"title": [text[:3] for text in texts], "article": texts})
    pq.write_table(table, tmp_path / "table.parquet")
    content = (tmp_path / "table.parquet").read_bytes()
    files = {f"data/{number:02}.parquet": content for number in range(20)}
    hub.repositories["datasets/me/tables"] = Repository()
    hub.repositories["datasets/me/tables"].commit({"README.md": b"# Tables", ".gitattributes": b"", **files})
    done_here("launch", "init", "a", "--text", "hf://datasets/me/tables")
    read = {path for _, path in hub.requests if "/resolve/" in path}
    assert 0 < len(read) <= 8
    (source,) = load(Path("a.corpus.yaml"), [], CorpusConfig).sources
    assert (source.format, source.path) == ("parquet", "hf://datasets/me/tables")
    assert source.options == {"text": "article"}
    source, _, _ = source_of(C4, None, None)
    assert (source.format, source.path) == ("jsonl", C4)
