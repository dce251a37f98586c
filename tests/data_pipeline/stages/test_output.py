"""A build replaces and removes no file that no build has written."""

import shutil
from pathlib import Path

import pytest

from data_pipeline.base import local_store
from data_pipeline.base.errors import UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.stages.inputs import inputs_of
from data_pipeline.stages.output import STAGES, WRITTEN, is_begun
from data_pipeline.stages.pipeline import build
from tests.data_pipeline.stages.test_inputs import write
from tests.support.builds import OFF, plain
from tests.support.tables import each


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@each("output", ["data", "data/", "link", "file://{}/data"])
def test_a_build_leaves_the_files_of_a_folder_as_they_were_that_has_the_names_of_its_own(tmp_path, output):
    """Spark and Dask write such names. The source is read from elsewhere, or from the folder itself."""
    write(tmp_path, "data/documents/part-abc.parquet", "data/documents/part-00000.parquet", "texts/a.txt")
    (tmp_path / "link").symlink_to("data")
    before = content(tmp_path)
    place = output.format(tmp_path) if "://" in output else f"{tmp_path}/{output}"
    for texts in ("texts", "data/documents"):
        config = plain(tmp_path, tmp_path / texts, "text", dedup=OFF, output=place)
        with pytest.raises(
            UserError, match=r"^output: .* has documents, which no build has written .* such as .*/corpus$"
        ):
            build(config, "documents")
        assert content(tmp_path) == before


@each("name", sorted(WRITTEN - {STAGES}))
def test_every_name_that_a_build_writes_marks_a_folder_of_somebody_else(tmp_path, name):
    assert not is_begun(LocalStore(tmp_path))
    write(tmp_path, "notes.txt")
    assert not is_begun(LocalStore(tmp_path))
    write(tmp_path, f"{name}/a" if "." not in name else name)
    with pytest.raises(UserError, match=f"has {name}, which no build has written"):
        is_begun(LocalStore(tmp_path))
    write(tmp_path, f"{STAGES}/driver")
    assert is_begun(LocalStore(tmp_path))
    shutil.rmtree(tmp_path / STAGES)
    write(tmp_path, "manifest.json", "blocks.parquet")  # a finished corpus, whose stages were removed
    assert is_begun(LocalStore(tmp_path))


def test_the_mark_of_a_begun_build_is_on_the_disk_before_any_other_file_is_written(tmp_path, monkeypatch):
    flushed = list[tuple[Path, list[str]]]()
    seen = lambda path: flushed.append((path, [one.name for one in path.iterdir()]))  # noqa: E731
    monkeypatch.setattr(local_store, "flush", seen)
    corpus = LocalStore(tmp_path / "new/corpus")
    corpus.claim()
    corpus.release()
    assert flushed == [(tmp_path / "new/corpus", [STAGES])]


@each(
    "output, texts, read",
    [
        ("data", "data", "data/a.txt"),
        ("data", "data/a.txt", "data/a.txt"),
        ("data", "data/*.txt", "data/a.txt"),
        ("data", "data/texts", "data/texts/b.txt"),
        (".", "data/texts", "data/texts/b.txt"),
        ("link", "data/texts", "data/texts/b.txt"),
        ("data", "link/texts", "link/texts/b.txt"),
        ("data/texts", "data", "data/texts/b.txt"),  # a folder of texts inside the source
        ("data/new", "data", ""),
        ("data/text", "data/texts", ""),  # the beginning of a name
    ],
)
def test_an_output_that_holds_a_file_of_a_source_is_refused(tmp_path, output, texts, read):
    write(tmp_path, "data/a.txt", "data/texts/b.txt")
    (tmp_path / "link").symlink_to("data")
    before = content(tmp_path)
    config = plain(tmp_path, tmp_path / texts, "text", dedup=OFF, output=f"{tmp_path}/{output}")
    if not read:
        for _ in range(2):  # a second build finds the files of the first
            build(config, "documents")
            files = ["a.txt", "texts/b.txt"] if texts == "data" else ["b.txt"]
            assert [file.name for file in inputs_of(config).files] == files
        return
    with pytest.raises(UserError) as refused:
        build(config, "documents")
    assert str(refused.value) == (
        f"output: {tmp_path}/{output} holds {tmp_path}/{read}, which source 'text' reads; a build replaces files in "
        f"its output: choose a folder without files of your own, such as {tmp_path}/{output}/corpus"
    )
    assert content(tmp_path) == before
