"""Units: what each is sent and returns doesn't grow with their number; merged files hold what the files held."""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from pydantic_core import to_json
from safetensors import safe_open
from safetensors.numpy import save_file

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.json_file import parse_json
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.object_store import ObjectStore
from data_pipeline.base.safetensors_file import growing_arrays
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup import keys, minhash
from data_pipeline.engine import merging
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished, Output, Result, read_finished
from data_pipeline.sources.record import Range
from data_pipeline.stages import parts, report, shards, tokens
from data_pipeline.stages.documents import STAGE as DOCUMENTS_STAGE
from data_pipeline.stages.kinds import PARTS
from data_pipeline.stages.parts import Histograms, WrittenPart
from data_pipeline.stages.pipeline import build, keep_only
from data_pipeline.stages.tokenizer import Sample, TokenizerResult
from data_pipeline.stages.tokens import SPLITS, TokenBucket, TokensResult
from data_pipeline.text.document import Document
from data_pipeline.tools import planning
from tests.conftest import write_c4, write_corpus_file
from tests.support.builds import checksums, documents_of, dropped_of, flip, plain, trained
from tests.support.tables import each

CONFIG = plain(Path("nowhere"), "*.wet.gz", "wet", rows={"packing": "complete_documents"})
MODEL = {"tokenizer/spiece.model": Output(1, "0" * 64)}
TRAINED = Finished("spiece", "", TokenizerResult(1, Sample()), MODEL, 1.0, 1.0)


LISTENERS: list[list[str]] = []  # get the folders that are listed


def _on_event(event: str, arguments: tuple) -> None:
    for listed in LISTENERS if event == "os.scandir" else ():
        listed.append(str(arguments[0]))


sys.addaudithook(_on_event)


def names_of(units: shards.Tokenized) -> list[str]:
    return [name for unit in units for name in unit.outputs]


COUNTED = Finished("train-00000", "", shards.RowsResult(7), {}, 1.0, 1.0)


def tokenized(number: int) -> shards.Tokenized:
    """`number` units of the tokens stage, each with the tokens of one shard."""
    of_each = TokensResult({"train": CONFIG.tokens_per_shard, "validation": 0})
    outputs = [(f"part-{part:05d}", Output(1, f"{part:064x}")) for part in range(number)]
    return [Finished(name, "", of_each, {f"{name}.safetensors": output}, 1.0, 1.0) for name, output in outputs]


def test_what_a_unit_is_sent_does_not_grow_with_the_number_of_units(tmp_path):
    longest, corpus = {}, LocalStore(tmp_path)
    for number in (10, 1000):
        buckets = shards.specs_of(CONFIG, corpus, tokenized(number), names_of(tokenized(number)), TRAINED)
        units = shards.plan_counts(CONFIG, buckets, {"train": 0, "validation": 0})
        assert len(units) == number + 1  # and one for validation
        longest[number] = max(len(to_json(unit)) for unit in units)
        (names,) = {unit.spec.files for unit in units}
        assert merging.read_names(corpus, names) == tuple(f"part-{part:05d}.safetensors" for part in range(number))
    assert longest[1000] - longest[10] <= 10  # digits of its number, and of how many there are


def test_every_units_fingerprint_depends_on_every_file(tmp_path):
    files = tokenized(3)
    before = shards.specs_of(CONFIG, LocalStore(tmp_path), files, names_of(files), TRAINED)
    files[1].outputs["part-00001.safetensors"] = Output(1, "f" * 64)
    after = shards.specs_of(CONFIG, LocalStore(tmp_path), files, names_of(files), TRAINED)
    assert all(one != other for (_, one), (_, other) in zip(before, after, strict=True))
    assert [spec for spec, _ in before] == [spec for spec, _ in after]


def test_a_result_is_checked_as_it_is_read():
    content = json.loads(to_json(COUNTED))
    assert parse_json(json.dumps(content), shards.COUNT.finished, "") == COUNTED
    content["result"]["rows"] = "7"
    with pytest.raises(FailedError, match=r"a\.json: damaged: result\.rows: .* got '7'"):
        parse_json(json.dumps(content), shards.COUNT.finished, "a.json")
    with pytest.raises(FailedError, match=r"a\.json: damaged: result\.tokens: "):
        parse_json(json.dumps(content), tokens.STAGE.finished, "a.json")


def test_the_fingerprint_of_a_dataclass_is_that_of_its_fields():
    fields = {"tokens": {"train": 1}, "lengths": {"8": 1}, "uncovered": {}, "characters": {}, "changed": {}}
    assert fingerprint([TokensResult({"train": 1}, {"8": 1}), Range(2)]) == fingerprint([fields, [2, None, 0]])
    assert fingerprint(CONFIG) == fingerprint(CONFIG.model_dump())


@each("count", [1, 3, 7, 4096, 4200])
def test_the_bounds_of_a_bucket_fall_into_it(count):
    for number in {0, 1, count // 2, count - 1} & set(range(count)):
        bounds = np.array(TokenBucket("train", number, count).bounds, np.uint64)
        assert tokens.bucket_numbers(bounds, count).tolist() == [number, number]


def test_a_worker_reads_a_list_of_names_once_for_its_units(tmp_path):
    corpus = LocalStore(tmp_path)
    path = merging.write_names(corpus, ["a", "b"])
    before = merging.read_names.cache_info()
    for _ in range(5):  # each unit comes with its own copy of the store
        assert merging.read_names(pickle.loads(pickle.dumps(corpus)), path) == ("a", "b")
    after = merging.read_names.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (4, 1)
    assert corpus != LocalStore(tmp_path / "other")


def test_documents_with_a_url_are_counted():
    histograms = Histograms()
    for url in ("http://example.org", "", "example.org/a"):
        histograms.add(Document("id", "text", url, "", "en", "source", "train", "", ""))
    assert histograms.with_urls == 2


@each(
    "files, readers, size, units",
    [
        (1, 1, 1, 0),
        (1000, 1000, 1, 0),  # a small corpus pays nothing
        (1024, 1, 1, 0),
        (1025, 1, 2, 1),
        (2_048, 4_200, 9, 227),
        (56_000, 4_200, 236, 238),
        (56_000, 256, 55, 1019),
        (1_024, 56_000, 61, 17),
        (300_000, 20_000, 6000, 50),
        (72_000, 4_194, 303, 238),
    ],
)
def test_files_are_merged_where_their_readers_would_open_many(files, readers, size, units):
    assert merging.group_size(files, readers, 10**6) == size
    names = {str(number): "" for number in range(files)}
    planned = merging.plan("", names, readers, 10**6)
    assert len(planned) == units
    done = [Finished(unit.name, "", Result(), {unit.outputs[0]: Output(1, "")}, 1.0, 1.0) for unit in planned]
    left = merging.to_read(names, done, readers, 10**6)
    assert [*left[: len(left) - units], *(name for unit in planned for name in unit.spec.files)] == [*names]
    assert len(left) <= 1024
    assert len(left) * readers <= 1e6


@each(
    "files, readers, size, whole", [(1025, 1, 2, 1023), (282, 4194, 2, 194), (56_000, 256, 55, 0), (7, 250_000, 2, 1)]
)
def test_merging_merges_only_surplus_files(files, readers, size, whole):
    assert merging.untouched(files, readers, 10**6, size) == whole
    groups = -(-(files - whole) // size)
    assert whole + groups <= min(1024, 10**6 // readers) < whole + groups + size


def test_a_bucket_merges_more_than_a_folder():
    """C4's 5,143 files of keys of lines and its 1,024 buckets of hashes. Each opening of a file is a few requests."""
    names = {str(number): "" for number in range(5143)}
    units = {store: len(merging.plan("", names, 1024, store.most_opens)) for store in (LocalStore, ObjectStore)}
    assert units == {LocalStore: 834, ObjectStore: 96}
    for store, merged in units.items():
        size = merging.group_size(5143, 1024, store.most_opens)
        whole = merging.untouched(5143, 1024, store.most_opens, size)
        assert 1024 * (whole + merged) <= store.most_opens


def test_a_build_that_merges_some_files_has_the_same_bytes(config, unmerged, tmp_path, monkeypatch):
    """The first files stay as they are, with the numbers of their units."""
    monkeypatch.setattr(merging, "_MOST_FILES", 3)
    corpus = Path(build(config.model_copy(update={"output": str(tmp_path / "corpus")})))
    assert checksums(corpus) == unmerged
    for stage in ("lines-keys", "minhash-keys", "tokens"):
        assert len(list((corpus / f".stages/{stage}-merged").glob("*.safetensors"))) == 1  # of four, two


def test_buckets_of_merged_pairs_are_those_of_the_files(tmp_path, monkeypatch):
    """Those of other tokens and of keys are in the builds below."""
    monkeypatch.setattr(tokens, "_BYTES_AT_ONCE", 100)
    chance, files = np.random.default_rng(3), []
    same = np.sort(chance.integers(0, 2**64, 6, np.uint64))  # hashes that files share: their order decides
    for number, documents in enumerate([12, 0, 30, 1, 7]):
        arrays = {}
        for split, count in zip(SPLITS, (documents, documents // 4), strict=True):
            hashes = np.sort(np.concatenate([chance.integers(0, 2**64, count, np.uint64), same[: count // 5]]))
            lengths = chance.integers(0, 9, len(hashes))
            ends, last = np.cumsum([0, *lengths]), np.uint64(2**64 - 1)
            index = [np.append(hashes, last), ends, np.append(lengths // 2, 0)]
            arrays[f"{split}.index"] = np.column_stack([column.astype(np.uint64) for column in index])
            arrays[f"{split}.tokens"] = chance.integers(0, 60_000, lengths.sum()).astype(np.uint16)
        files.append(f"{number}.safetensors")
        save_file(arrays, tmp_path / files[-1])
    tokens.merge_tokens(Context(LocalStore(tmp_path)), merging.MergeSpec(tuple(files), 0, "merged.safetensors"))
    for count in (1, 3, 8):
        all_buckets = [TokenBucket(split, number, count) for split in SPLITS for number in range(count)]
        merged, apart = ["merged.safetensors"], files
        counts = [len(tokens.read_bucket(LocalStore(tmp_path), apart, bucket).tokens) for bucket in all_buckets]
        for stored in (merged, apart):
            assert tokens.count_tokens(LocalStore(tmp_path), stored, all_buckets) == counts
        for bucket in all_buckets:
            found, wanted = (
                tokens.read_bucket(LocalStore(tmp_path), merged, bucket),
                tokens.read_bucket(LocalStore(tmp_path), apart, bucket),
            )
            for name in ("tokens", "starts", "targets"):
                assert getattr(found, name).tolist() == getattr(wanted, name).tolist()


@each("values", [3, 5])
def test_arrays_that_are_not_as_long_as_they_were_said_to_be_are_no_file(tmp_path, values):
    shapes, put = {"a": (np.int64, (4,))}, LocalStore(tmp_path).put("x")
    wrong = pytest.raises(ValueError, match=r"a: (fewer|more) values")
    with wrong, put as path, growing_arrays(path, shapes) as append:
        append("a", np.zeros(values, np.int64))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def config(small_corpus, tmp_path_factory) -> CorpusConfig:
    """Four files of pages of which many are there twice, and several buckets in every stage."""
    folder = tmp_path_factory.mktemp("merging")
    for part in range(4):
        write_c4(folder / f"c4-{part}.json.gz", records=12, skip=8 * part)
    dedup = {"urls": "newest", "lines": True, "documents": True, "minhash": True, "keys_per_bucket": 100}
    file = write_corpus_file(folder / "corpus.yaml", dedup=dedup, tokenizer=trained(small_corpus))
    return load(file, [], CorpusConfig)


@pytest.fixture(scope="module")
def unmerged(config) -> dict[str, str]:
    return checksums(Path(build(config)))


@pytest.fixture
def grouped(monkeypatch) -> list[int]:
    """The size of groups, to be changed, by which all files are merged."""
    sizes = [1]
    monkeypatch.setattr(merging, "group_size", lambda files, readers, opens: sizes[0])
    for module, bound, number in ((tokens, "BYTES", 1000), (keys, "KEYS", 100), (keys, "DUPLICATES", 10)):
        monkeypatch.setattr(module, f"_{bound}_AT_ONCE", number)  # so that files are merged in several pieces
    return sizes


def test_a_build_with_nothing_to_do_counts_no_tokens(config, unmerged, monkeypatch):
    """Counting reads the hashes of all documents."""
    monkeypatch.setattr(shards, "count_tokens", Mock(side_effect=AssertionError))
    assert checksums(Path(build(config))) == unmerged


def test_a_build_that_merges_has_the_same_bytes(config, unmerged, grouped, capsys):
    """In the directory of the first build: what doesn't depend on how files are merged isn't done again."""
    stages = Path(config.output) / ".stages"
    for size, names in ((2, ["-merged"]), (3, ["-merged"]), (1, [])):
        grouped[0] = size
        assert checksums(Path(build(config))) == unmerged
        found = {path.name for path in stages.glob("*-merged*")}
        steps = [f"{step}-{kind}" for step in ("urls", "lines", "documents") for kind in ("keys", "duplicates")]
        assert found == {of + name for of in (*steps, "minhash-keys", "tokens") for name in names}
        again = [line for line in capsys.readouterr().out.splitlines() if " to do (" in line]
        assert [line for line in again if "-merged" not in line] == []


def test_units_that_read_several_parts_make_the_same_shards(config, unmerged, tmp_path, monkeypatch):
    """Pairs of parts: their documents stand in one file, in the same order. The same documents are dropped, and the
    same ones stay."""
    apart = Path(config.output)

    def rows(corpus: Path) -> list[list[str]]:
        return sorted([*row.values()] for row in dropped_of(corpus))

    assert any(row["kept"] for row in dropped_of(apart))
    monkeypatch.setattr(parts, "_ENOUGH_UNITS", 2)
    corpus = Path(build(config.model_copy(update={"output": str(tmp_path / "corpus")})))
    assert rows(corpus) == rows(apart)
    assert documents_of(corpus) == documents_of(apart)
    found = checksums(corpus)
    files = [name for name in found if name.startswith("documents/")]
    assert len(files) < sum(name.startswith("documents/") for name in unmerged) == 4
    for name in {*found, *unmerged} - {"manifest.json", "lineage.parquet"}:
        assert name.startswith(("documents/", "dropped/")) or found[name] == unmerged[name]
    units = {stage.name: stage.units for stage in report.read(corpus).stages}
    assert units["documents"] == 4
    assert {units[stage] for stage in ("urls-keys", "lines-keys", "minhash-keys", "deduplicated")} == {len(files)}


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


def test_a_plan_counts_the_units_of_the_build(config, unmerged):
    found = report.read(Path(config.output))
    units = {stage.name: stage.units for stage in found.stages if "-merged" not in stage.name}  # of another test
    stages = [replace(stage, megabytes=60.0, megabytes_per_core_second=1.0) for stage in found.stages]
    small = config.model_copy(update={"ray": config.ray.model_copy(update={"small_bytes": 0})})
    planned = planning.forecast_build(small, replace(found, stages=stages), "", workers=10**6)
    others = [
        stage for stage in planned.stages if stage.name in units and stage.core_seconds
    ]  # no tokenizer is trained
    counted = {stage.name: round(stage.core_seconds / stage.seconds) for stage in others}
    assert counted == {name: number for name, number in units.items() if name != "tokenizer"}
    assert [counted[stage] for stage in ("documents", "lines-keys", "lines-duplicates", "shards")] == [4, 4, 4, 3]


def test_more_keys_get_more_slots_and_too_many_are_refused(config, unmerged, tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_LEAST_SLOTS", 2)
    more = config.model_copy(update={"output": str(tmp_path / "more")})
    assert checksums(Path(build(more))) == unmerged
    with safe_open(tmp_path / "more/.stages/lines-keys/part-00001.safetensors", "numpy") as file:
        slots = len(file.get_tensor("slots")) - 1
    read = sum(
        part.characters for part in parts.parts_of(read_finished(DOCUMENTS_STAGE, LocalStore(tmp_path / "more")))
    )
    assert read > sum(len(one["text"]) for one in documents_of(tmp_path / "more"))
    assert slots / 2 < read / 40 / 100 <= slots  # a line counts as 40 characters at least; 100 keys a bucket
    monkeypatch.setattr(keys, "_MOST_SLOTS", 2)
    told = (
        r"dedup\.keys_per_bucket: 100 of the [\d,]+ keys of lines can't be compared at once in 2 tasks, .*; set it to "
    )
    with pytest.raises(UserError, match=told):
        build(config.model_copy(update={"output": str(tmp_path / "fewer")}))


def test_clusters_that_the_memory_does_not_suffice_for_are_refused(monkeypatch):
    monkeypatch.setattr(minhash, "available_memory", lambda: 160_000 - 8000 - 500 * 16 - 1)
    pairs = np.arange(1000, dtype=np.uint64).reshape(-1, 2)
    few = minhash.Clusters()
    few.join(pairs[1:])
    assert len(few.members()[0]) == 998
    clusters = minhash.Clusters()
    clusters.join(pairs)
    told = "the clusters of 1,000 documents take 144.0 kB more memory, and 144.0 kB are free; raise dedup.minhash.rows"
    with pytest.raises(FailedError, match=told):
        clusters.members()


def test_a_build_that_merges_from_the_start_ends_with_the_same_bytes(config, unmerged, grouped, tmp_path):
    grouped[:] = [2]
    changed = config.model_copy(update={"output": str(tmp_path / "corpus")})
    corpus = Path(build(changed))
    assert checksums(corpus) == unmerged
    told = {stage.name: stage for stage in report.read(corpus).stages}
    assert told["tokens-merged"].units == -(-told["tokens"].units // 2)
    assert told["tokens-merged"].written_megabytes == pytest.approx(told["tokens"].written_megabytes, rel=0.1)

    stages = ("tokens-merged", "lines-duplicates-merged")
    damaged = [corpus / ".stages" / stage / "00001.safetensors" for stage in stages]
    before = [path.read_bytes() for path in damaged]
    flip(damaged[0])
    damaged[1].write_bytes(before[1][:-1])
    build(changed, repair=True)
    assert [path.read_bytes() for path in damaged] == before
    assert checksums(corpus) == unmerged


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
