"""Parts of documents: their groups, their files, and what the driver keeps of the results of units that write them."""

import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from pydantic_core import to_json

from data_pipeline.base.local_store import LocalStore
from data_pipeline.dedup.places import Span
from data_pipeline.engine.work_units import Finished, Output, read_finished, recorded
from data_pipeline.sources.record import Range
from data_pipeline.stages import parts
from data_pipeline.stages.documents import STAGE, DocumentsResult, InputResult, InputsRead
from data_pipeline.stages.kinds import PARTS
from data_pipeline.stages.parts import Histograms, WrittenPart, part_file
from data_pipeline.stages.pipeline import keep_only
from data_pipeline.text.document import EXAMPLES, Document, Tally
from tests.support.builds import plain

INPUTS = 1000


def finished(number: int) -> Finished[DocumentsResult]:
    """A unit of the stage `documents`, with as much in its result as that of a WET file has."""
    tally, histograms = Tally(), Histograms()
    for rule in range(20):
        for line in range(EXAMPLES):
            tally.line(f"rule {rule}", f"Line {line} of part {number}, which is as long as a line is. " * 4)
    histograms.languages.update({f"l{language}": language for language in range(40)})
    file, name = f"CC-MAIN-2024-10/wet/{number:06d}.warc.wet.gz", f"part-{number:05d}"
    path, sha256 = f".stages/documents/{name}.parquet", f"{number:064x}"
    spans = [Span(f"crawl/{file}", 0, 40_000)]
    part = WrittenPart(path, "crawl", f"crawl/{file}/000000000", 10**8, {"train": 40_000}, 10**8, spans=spans)
    read = InputResult(file, Range(), "ok", 40_000, 0, [], bytes=10**8, sha256=sha256)
    result = DocumentsResult.of(tally, [part], histograms, source="crawl", inputs=[read])
    return Finished(name, sha256, result, {path: Output(10**8, sha256)}, 20.5, 20.5)


def written(folder: Path) -> LocalStore:
    """A store with the records of 1,000 units."""
    store = LocalStore(folder)
    lines = b"".join(to_json(finished(number)) + b"\n" for number in range(INPUTS))
    store.append(".stages/documents/finished.jsonl", lines, [])
    return store


def test_the_driver_keeps_two_kilobytes_of_an_input_whose_record_has_fourteen(tmp_path):
    store = written(tmp_path)
    assert store.sizes([name := ".stages/documents/finished.jsonl"])[name] > 14_000 * INPUTS
    read_finished(STAGE, store)  # imports and caches
    tracemalloc.start()
    try:
        units = read_finished(STAGE, store)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(units) == INPUTS
    assert held < 2200 * INPUTS


def test_results_that_are_kept_of_finished_units_are_those_that_are_read_of_their_records(tmp_path):
    kept = [STAGE.kept(finished(number)) for number in range(INPUTS)]
    assert kept == read_finished(STAGE, written(tmp_path))
    assert {type(unit.result) for unit in kept} == {InputsRead}


def test_records_have_the_whole_results(tmp_path):
    whole = [*recorded(STAGE, DocumentsResult, written(tmp_path))]
    assert whole == [finished(number) for number in range(INPUTS)]


def test_long_targets_of_short_inputs_fill_row_groups(tmp_path):
    """A row group ends at 8 million characters. A short input counts as 1,000."""
    with part_file(LocalStore(tmp_path), "part.parquet") as file:
        for number in range(5):
            file.add(Document(id=str(number), text="a", target="b" * 2_000_000))
    with pq.ParquetFile(tmp_path / "part.parquet") as written:
        groups = [written.metadata.row_group(number).num_rows for number in range(written.num_row_groups)]
    assert groups == [4, 1]
    assert file.characters == 5 * 2_001_000


CONFIG = plain(Path("nowhere"), "*.wet.gz", "wet")


LISTENERS: list[list[str]] = []  # get the folders that are listed


def _on_event(event: str, arguments: tuple) -> None:
    for listed in LISTENERS if event == "os.scandir" else ():
        listed.append(str(arguments[0]))


sys.addaudithook(_on_event)


def test_documents_with_a_url_are_counted():
    histograms = Histograms()
    for url in ("http://example.org", "", "example.org/a"):
        histograms.add(Document("id", "text", url, "", "en", "source", "train", "", ""))
    assert histograms.with_urls == 2


def test_a_crawl_has_two_thousand_units_in_each_later_stage():
    """72,000 files of which 806 GB of text are left, as of Common Crawl by C4's rules, beside a small source."""
    chance = np.random.default_rng(0)
    sizes = [*chance.normal(806e9 / 72_000, 3e6, 72_000).clip(0).astype(int).tolist(), *[900_000_000] * 2, *[10] * 50]
    written = [
        WrittenPart(f"part-{number:05d}", "wet" if number < 72_000 else "books", "", size, {}, characters=size)
        for number, size in enumerate(sizes)
    ]
    groups = parts.grouped(written, CONFIG)
    assert [part for group in groups for part in group] == written
    assert 806e9 / 500e6 < len(groups) <= 2000
    for group in groups:
        assert len({part.source for part in group}) == 1
        assert len(group) == 1 or sum(part.text_bytes for part in group) <= 500_000_000
    assert [len(group) for group in groups[-3:]] == [1, 1, 50]
    few = parts.grouped(written[:1000], CONFIG)
    assert few == [[part] for part in written[:1000]]  # as many as there were without groups


def test_files_that_no_unit_wrote_are_found_by_one_listing_of_each_folder(tmp_path):
    kept = [f".stages/documents/{folder}part-{number}.parquet" for folder in ("", "001/", "002/") for number in "ab"]
    others = [f".stages/documents/001/{name}" for name in ("part-c.parquet", "keep.parquet")]
    for name in [*kept, *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed: list[str] = []
    LISTENERS.append(listed)
    keep_only(PARTS, LocalStore(tmp_path), kept)
    LISTENERS.clear()
    assert sorted(path.name for path in map(Path, listed)) == ["001", "002", "documents"]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")}
    assert left == {*kept, others[1]}
