"""Builds corpora with the real pipeline on Ray, as the command does."""

import bz2
import errno
import gzip
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import md5, sha256
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Never

import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset

from data_pipeline.base.atomic import lock, write_json
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, StoreUnavailable, UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.packages import code_version
from data_pipeline.config import CorpusConfig, SplitConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.tokenizer.config import TrainedConfig
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece, SentencePieceConfig
from data_pipeline.corpus.verify import verify
from data_pipeline.engine import work_units
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished, Output
from data_pipeline.stages import dedup as dedup_stages
from data_pipeline.stages import documents, report, shards, tokenizer
from data_pipeline.stages import tokens as tokens_stage
from data_pipeline.stages.documents import plan as plan_documents
from data_pipeline.stages.documents import split_of, write_documents
from data_pipeline.stages.inputs import inputs_of
from data_pipeline.stages.parts import Part
from data_pipeline.stages.pipeline import build
from data_pipeline.stages.tokens import TokensWritten
from data_pipeline.text.vocabulary import Vocabulary
from tests.conftest import C4_SAMPLE, SAMPLES, write_c4, write_corpus_file
from tests.support.builds import checksums, documents_of, dropped_of, flip, plain, trained
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.tables import each

KEPT = "; its undamaged records were kept"


def samples_of(shard: Path) -> list[dict[str, np.ndarray]]:
    return list(webdataset.WebDataset(str(shard), shardshuffle=False).decode())


def test_shards_are_plain_webdataset_with_every_token_of_every_training_document_in_a_row_once(small_corpus):
    """The rows and the dropped tail, concatenated, are the documents; document_offsets are their starts."""
    blocks = pq.read_table(small_corpus / "blocks.parquet").to_pylist()
    corpus = open_corpus(small_corpus)
    train = (row for row in documents_of(small_corpus) if row["split"] == "train")
    documents = {tuple(corpus.tokenizer.encode([row["text"]])[0]): row["id"] for row in train}
    found = []
    for shard in corpus.manifest.splits["train"].shards:
        tokens, starts, samples = [], [], samples_of(small_corpus / shard.name)
        first_rows = [block["first_row"] for block in blocks if block["shard"] == shard.name]
        assert [int(sample["__key__"]) for sample in samples] == first_rows
        for sample in samples:
            assert (sample["tokens.npy"].dtype, sample["row_offsets.npy"].dtype) == (np.uint16, np.int64)
            assert set(np.diff(sample["row_offsets.npy"])) == {34}  # 5 masked in 2 spans: 34 - 5 + 2, and EOS, make 32
            starts += [len(tokens) + int(start) for start in sample["document_offsets.npy"]]
            tokens += sample["tokens.npy"].tolist()
        ends = [*starts[1:], len(tokens)]
        found += [tuple(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]
    whole = [tokens for tokens in found if tokens in documents]
    assert len(found) - len(whole) <= len(corpus.manifest.splits["train"].shards)  # only the last may be cut
    assert len(set(whole)) == len(whole)
    assert len(found) == corpus.manifest.splits["train"].documents


def test_the_split_is_tfds_rule():
    """The digest modulo 1000, computed here by hand."""
    ratios = {0: (0, 1), 2.7e-7: (27, 10**8), 0.001: (1, 1000), 0.005: (1, 200), 0.03: (3, 100), 1 / 3: (1, 3)}
    assert {share: SplitConfig(validation_fraction=share).ratio for share in ratios} == ratios
    urls = [f"https://www.example.com/{n}/?utm_source=x" for n in range(5000)]
    held_out = [n for n, url in enumerate(urls) if split_of(url, "", 1, 1000) != "train"]
    by_hand = [n for n in range(5000) if int(md5(f"example.com/{n}".encode()).hexdigest(), 16) % 1000 == 0]
    assert held_out == by_hand
    assert held_out
    assert split_of("", "c4/file/000000001", 1, 1) == "validation"


def test_a_split_by_position_holds_out_the_end_of_each_source(tmp_path):
    """One file: of the characters 4, 2, 3, 1 and 2 of 12, the third document begins at the middle, the fourth after
    three quarters. Then the last third of three files of one size, and its last half: half of the second file."""

    def splits(fraction: float, files: str) -> str:
        split = {"by": "position", "validation_fraction": fraction}
        config = plain(tmp_path, tmp_path / files, "jsonl", split=split)
        (unit,) = plan_documents(config, tmp_path / "corpus", inputs_of(config).files)
        (part,) = write_documents(Context(LocalStore(tmp_path / "corpus")), unit.spec).parts
        return "".join(split[0] for split in pq.read_table(tmp_path / "corpus" / part.path)["split"].to_pylist())

    for number in range(3):
        texts = ("aaaa", "bb", "ccc", "d", "ee")
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for fraction, expected in ((0.5, "ttvvv"), (0.49, "tttvv"), (0.25, "tttvv"), (0.2, "ttttv"), (0.0, "ttttt")):
        assert splits(fraction, "0.jsonl") == expected
    for fraction, expected in ((0.3333, "tttttttttttvvvv"), (0.5, "tttttttvvvvvvvv"), (0.9999, "tvvvvvvvvvvvvvv")):
        assert splits(fraction, "*.jsonl") == expected


def test_an_outage_while_characters_are_counted_moves_no_split(tmp_path, monkeypatch):
    def broken_off(*_: object) -> Iterator[Never]:
        raise StoreUnavailable("s3://bucket: unavailable for 300 s")
        yield

    (tmp_path / "a.jsonl").write_text('{"text": "aa"}\n' * 10)
    config = plain(tmp_path, tmp_path / "a.jsonl", "jsonl", split={"by": "position", "validation_fraction": 0.3})
    (unit,) = plan_documents(config, tmp_path / "corpus", inputs_of(config).files)
    monkeypatch.setattr(documents, "read_records", broken_off)
    with pytest.raises(StoreUnavailable):
        documents.splitter(unit.spec, unit.spec.inputs[0])


@each("fraction", [0.0, 0.05, 0.12, 0.3, 0.99])
def test_a_split_by_files_holds_out_whole_files_with_a_share_of_the_bytes(tmp_path, fraction):
    """62 files of 1 to 62 kB, whose order is that of their names' md5. No more than half of a file is missing or too
    much; one file at least is held out, and one is left."""
    sizes = {f"{number:02}.txt": 1000 * (1 + number) for number in range(62)}
    for name, size in sizes.items():
        (tmp_path / name).write_text("a b c d " * (size // 8))
    split = {"by": "files", "validation_fraction": fraction}
    config = plain(tmp_path, tmp_path / "*.txt", "text", split=split)
    inputs = [
        spec
        for unit in plan_documents(config, tmp_path / "corpus", inputs_of(config).files)
        for spec in unit.spec.inputs
    ]
    assert {spec.held_out for spec in inputs} <= {(0, 1), (1, 1)}
    held_out = {spec.file for spec in inputs if spec.held_out == (1, 1)}
    ordered = sorted(sizes, key=lambda name: md5(name.encode()).hexdigest())
    assert held_out == set(ordered[: len(held_out)])
    wanted, found = fraction * sum(sizes.values()), sum(sizes[name] for name in held_out)
    assert len(held_out) < len(sizes)
    if fraction == 0.99:
        assert len(held_out) == len(sizes) - 1
    elif fraction:
        border = max(sizes[ordered[len(held_out) - 1]], sizes[ordered[len(held_out)]])
        assert abs(found - wanted) <= border / 2
    else:
        assert held_out == set()


def test_a_source_of_which_a_split_by_files_holds_out_nothing_is_named(tmp_path, capsys):
    """One file is left to train on. A source with a split of its own isn't divided."""
    sources = []
    for name, files in {"one": 1, "two": 2, "own": 1}.items():
        (tmp_path / name).mkdir()
        for number in range(files):
            (tmp_path / name / f"{number}.txt").write_text("Text.")
        split = {"split": "train"} if name == "own" else {}
        sources.append({"format": "text", "name": name, "path": str(tmp_path / name), **split})
    for by, fraction, expected in (("files", 0.1, 1), ("files", 0, 0), ("hash", 0.1, 0)):
        split = {"by": by, "validation_fraction": fraction}
        build(plain(tmp_path, "", "text", sources=sources, split=split), until="documents")
        warnings = [line for line in capsys.readouterr().err.splitlines() if "split.by" in line]
        told = "source one has one file, so nothing is held out of it; use hash or position"
        assert warnings == [f"warning: split.by: files: {told}"] * expected


def test_records_that_a_reader_leaves_out_wait_in_bounded_memory_and_are_all_in_the_table(tmp_path, monkeypatch):
    """After 10,000 damaged lines, the lines up to the next record have the file's id. Later ones have their own."""
    held, note = list[int](), documents._LeftOut._note

    def noted(left_out: documents._LeftOut) -> None:
        held.append(len(left_out._waiting))
        note(left_out)

    monkeypatch.setattr(documents._LeftOut, "_note", noted)
    lines = ["no record"] * 10_001 + ['{"text": "A text."}', "no record", '{"text": "Another."}', "no record"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = plain(tmp_path, tmp_path / "a.jsonl", "jsonl")
    (unit,) = plan_documents(config, tmp_path / "corpus", inputs_of(config).files)
    write_documents(Context(LocalStore(tmp_path / "corpus")), unit.spec)
    assert held == [10_000, 1, 1, 1]
    (source,) = config.sources
    expected = [f"{source.name}/a.jsonl"] * 10_001 + [f"{source.name}/a.jsonl/{at:09d}" for at in (10_002, 10_004)]
    assert [row["id"] for row in dropped_of(tmp_path / "corpus")] == expected


def test_a_second_run_does_nothing(small_corpus):
    def times() -> dict[Path, int]:
        """Of all files but the one that names the build at work."""
        files = {path for path in small_corpus.rglob("*") if path.is_file()} - {small_corpus / ".stages/driver"}
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    printed = done_here("data-pipeline", "build", small_corpus.parent / "corpus.yaml")
    assert "to do" not in printed
    assert times() == before


def test_stages_of_urls_are_skipped_where_no_document_has_one(small_corpus, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("To be, or not to be.\n\nThat is the question.\n" * 20)
    model = {"path": str(small_corpus / "tokenizer/spiece.model")}
    config = plain(tmp_path, tmp_path / "a.txt", "text", tokenizer=model, split={"validation_fraction": 0})
    for units in ("1 unit to do (new), 0", "1 of 1 unit"):
        corpus = Path(build(config))
        said = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" up to date")]
        stages = [line.split(": ")[0] for line in said]
        assert [stage for stage in stages if "urls" in stage] == []
        assert f"lines-keys: {units} up to date" in said
        assert [stage.name for stage in report.read(corpus).stages] == stages
    assert not (corpus / ".stages/urls-keys").exists()


def test_a_changed_tokenizer_redoes_tokenization_and_not_cleaning(small_corpus, tmp_path):
    copy, config = shutil.copytree(small_corpus, tmp_path / "corpus"), small_corpus.parent / "corpus.yaml"
    documents = {path: path.stat().st_mtime_ns for path in (copy / "documents").iterdir()}
    printed = done_here("data-pipeline", "build", config, f"output={copy}", "tokenizer.vocab_size=400")
    assert "documents: 3 of 3 units up to date" in printed
    assert "tokens: 3 units to do (input or config changed)" in printed
    texts = [row["text"] for row in documents_of(copy) if row["split"] == "train"]
    assert f"tokenizer: trained on {len(texts)} of {len(texts)} training documents, " in printed
    sample = {"documents": len(texts), "bytes": len("".join(texts).encode())}
    assert vars(report.read(copy).tokenizer_sample) == sample
    assert {path: path.stat().st_mtime_ns for path in (copy / "documents").iterdir()} == documents
    assert open_corpus(copy).fingerprint != open_corpus(small_corpus).fingerprint


def test_wikipedia_and_c4_samples_build_together(small_corpus, tmp_path, monkeypatch):
    """Builds the second part of the shipped dump together with C4: redirects and other namespaces are dropped and
    counted. The clocks stand still, but for a second of processor time between two looks at it: two for each unit."""
    seconds = itertools.count()
    clocks = SimpleNamespace(monotonic=lambda: 0.0, process_time=lambda: float(next(seconds)))
    monkeypatch.setattr(work_units, "time", clocks)
    sources = [
        {"format": "wikipedia", "name": "enwiki", "path": str(SAMPLES / "*articles2.xml.bz2"), "language": "en"},
        {"format": "c4", "path": str(C4_SAMPLE), "language": "en"},
    ]
    config = write_corpus_file(tmp_path / "corpus.yaml", sources=sources, tokenizer=trained(small_corpus))
    printed = done_here("data-pipeline", "build", config)
    said = "documents: 2 files → 1,767 documents, 1,596 kept, 171 dropped: redirect 171"
    assert said in printed.splitlines()
    assert f"the report is {tmp_path}/corpus/report.md" in printed
    stats = json.loads(run_here("data-pipeline", "stats", tmp_path / "corpus", "--json").stdout)
    assert stats["documents"]["read"] == stats["documents"]["kept"] + sum(stats["documents"]["dropped"].values())
    assert stats["documents"]["dropped"]["redirect"] > 0
    phrases = dict.fromkeys(("s1/2", "s16", "s36/37/39", "s45", "s61"), 1)  # S-Phrases: {{S1/2}}, {{S16}}, …
    assert stats["template_holes"] | phrases == stats["template_holes"]
    for name in phrases:
        assert f"\n| {name} | 1 | █" in (tmp_path / "corpus/report.md").read_text()
    assert [entry["status"] for entry in stats["inputs"]] == ["ok", "ok"]
    assert stats["inputs"][1]["documents"] == 1000
    for stage in stats["stages"]:  # one unit after the other, here
        assert (stage["workers"], stage["ray_start_seconds"], stage["idle_seconds"]) == (1, 0, 0)
        assert (stage["core_seconds"], stage["driver_core_seconds"]) == (stage["units"], stage["units"] + 1)
    table = (tmp_path / "corpus/report.md").read_text().split("## Where the time went")[1]
    shown = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")][2:]
    assert shown == [*(f"| {stage['name']}" for stage in stats["stages"]), "| together"]
    first, *_, last = documents_of(tmp_path / "corpus")
    assert list(first)[:7] == ["id", "text", "url", "title", "language", "source", "split"]
    assert first["id"].startswith("enwiki/enwiki-20060303-pages-articles2.xml.bz2/0")
    assert (last["id"], last["timestamp"]) == (f"c4/{C4_SAMPLE.name}/000000999", "2019-04-21T10:19:50Z")


def test_verify_names_what_is_damaged_missing_or_not_of_the_corpus(small_corpus, tmp_path):
    """A corpus without any of its documents is whole, but not one that lacks some of them."""
    copy = shutil.copytree(small_corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns(".stages"))
    assert verify(open_corpus(copy)) == []
    shard = copy / "shards/train/shard-00001.tar"
    (copy / "shards/train/.shard-00000.tar.0123.tmp").write_bytes(b"left by a writer that was killed")
    foreign = [copy / name for name in ("documents/more.parquet", "shards/train/shard-99999.tar")]
    for path in foreign:
        shutil.copy(shard, path)
    lines = [f"{path}: not in the manifest; remove it" for path in foreign]
    assert verify(open_corpus(copy)) == lines
    said = run_here("data-pipeline", "verify", copy).stderr.removeprefix("error: ")
    assert said.splitlines() == lines  # and not that --repair makes them again
    for path in foreign:
        path.unlink()
    (copy / "documents/part-00000.parquet").unlink()
    assert verify(open_corpus(copy)) == [f"{copy}/documents/part-00000.parquet: missing"]
    shutil.rmtree(copy / "documents")
    assert verify(open_corpus(copy)) == []


def test_damage_in_any_file_is_named_and_repair_makes_it_again_to_the_byte(small_corpus, tmp_path):
    """Damages one byte in a file of each stage: sizes don't show it, and even the input of a stage may be damaged."""
    copy, config = shutil.copytree(small_corpus, tmp_path / "corpus"), small_corpus.parent / "corpus.yaml"
    damaged = ["documents/part-00001.parquet", "tokenizer/spiece.model", "blocks.parquet"]
    damaged += ["shards/train/shard-00000.tar", "shards/validation/shard-00000.tar"]
    for name in [*damaged, ".stages/tokens/part-00002.safetensors"]:
        flip(copy / name)
    (copy / "report.json").write_text("{}")
    shutil.copy(copy / "shards/train/shard-00001.tar", extra := copy / "shards/train/shard-00077.tar")
    found = run_here("data-pipeline", "verify", copy)
    assert found.returncode == 1
    *named, way_out = found.stderr.removeprefix("error: ").splitlines()
    files = sorted(map(str, [*(copy / name for name in [*damaged, "report.json"]), extra]))
    assert sorted(line.split(": ")[0] for line in named) == files
    assert "data-pipeline build CORPUS.yaml --repair" in way_out
    flip(copy / "lineage.parquet")  # without it, the checksums of documents are unknown
    unknown = {f"{copy / name}" for name in ["lineage.parquet", *damaged[1:], "report.json"]} | {str(extra)}
    assert {line.split(": ")[0] for line in verify(open_corpus(copy))} == unknown
    with pytest.raises(FailedError, match=r"lineage\.parquet: sha256 differs from the manifest's"):
        open_corpus(copy).lineage()
    repaired = done_here("data-pipeline", "build", config, f"output={copy}", "--repair")
    assert f"{copy}/.stages/tokens/part-00002.safetensors: damaged, will be rebuilt" in repaired
    assert "documents: 1 unit to do (new), 2 up to date" in repaired
    assert checksums(copy) == checksums(small_corpus)
    assert verify(open_corpus(copy)) == []
    assert json.loads((copy / "report.json").read_text())["documents"]["kept"] == 180


def test_a_repair_names_what_it_writes_again(small_corpus, tmp_path):
    copy = shutil.copytree(small_corpus, tmp_path / "copy")
    repair = ("data-pipeline", "build", small_corpus.parent / "corpus.yaml", f"output={copy}", "--repair")
    before = (copy / "manifest.json").stat().st_mtime_ns
    said = done_here(*repair, "--until", "documents")
    assert "repair: 0 damaged files; the report will be rewritten\n" in said
    assert (copy / "manifest.json").stat().st_mtime_ns == before
    said = done_here(*repair)
    assert "repair: 0 damaged files; manifest, its tables and report will be rewritten\n" in said
    assert (copy / "manifest.json").stat().st_mtime_ns > before


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_still_checked(small_corpus, tmp_path):
    copy = shutil.copytree(small_corpus, tmp_path / "copy")
    names = ["documents/part-00000.parquet", "tokenizer/spiece.model", "shards/train/shard-00000.tar"]
    for name in names:
        (copy / name).unlink()
        (copy / name).mkdir()
    assert set(verify(open_corpus(copy))) == {f"{copy / name}: can't be read: Is a directory" for name in names}
    (copy / names[0]).rmdir()
    (copy / names[1]).rmdir()
    repair = ("data-pipeline", "build", small_corpus.parent / "corpus.yaml", f"output={copy}", "--repair")
    done = run_here(*repair)
    assert f"error: {copy / names[2]}: Is a directory; what is finished is kept\n" in done.stderr
    (copy / names[2]).rmdir()
    done_here(*repair)
    assert verify(open_corpus(copy)) == []


def test_a_disk_that_is_full_while_the_driver_writes_is_one_line_and_the_next_build_goes_on(
    small_corpus, tmp_path, monkeypatch
):
    """Whatever the driver writes: a unit of a worker is tested on a disk that is full."""
    config = load(small_corpus.parent / "corpus.yaml", [f"output={tmp_path}"], CorpusConfig)
    said = f"{tmp_path}: No space left on device; what is finished is kept"

    def build_on_full_disk() -> str:
        with pytest.raises(FailedError) as failed:
            build(config)
        return str(failed.value)

    def refuse(*_: object) -> Never:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", refuse)
        assert build_on_full_disk() == said
    whole = Path.replace
    for full in ("blocks.parquet", "lineage.parquet", "manifest.json", "report.json", "complete"):

        def replace(temporary: Path, path: Path, full: str = full) -> Path:
            return refuse() if path.name == full else whole(temporary, path)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", replace)
            assert build_on_full_disk() == said
    build(config)
    assert checksums(tmp_path) == checksums(small_corpus)


def test_a_flipped_bit_anywhere_in_the_manifest_or_the_report_is_noticed(small_corpus, tmp_path):
    """Bits drawn from all over the manifest and each file of the report, and the last ones of the two checksums."""
    copy = shutil.copytree(small_corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns(".stages"))
    chance = random.Random(1)
    for name in ("manifest.json", "report.json", "report.md"):
        path = copy / name
        whole = path.read_bytes()
        end = range(len(whole) - 90, len(whole), 4) if name.endswith("json") else range(0)
        for place in [*chance.sample(range(len(whole)), 15), *end]:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            try:
                problems = verify(open_corpus(copy))
            except FailedError as error:
                problems = [str(error)]
            assert [line.partition(": ")[0] for line in problems] == [str(path)], (name, place)
        path.write_bytes(whole)
    assert verify(open_corpus(copy)) == []


@pytest.mark.slow
def test_a_build_does_again_what_its_notes_do_not_vouch_for(small_corpus, tmp_path):
    """Damages every record of a finished unit and every list of names that a build keeps for itself."""
    copy = shutil.copytree(small_corpus, tmp_path / "corpus")
    strange = itertools.cycle([b"\xff", b"[]", b'{"name": "a"}', b"null", b""])
    for options in ([], ["--repair"]):
        for path in sorted((copy / ".stages").glob("*/*.json*")):
            path.write_bytes(next(strange))
        done_here("data-pipeline", "build", small_corpus.parent / "corpus.yaml", f"output={copy}", *options)
        assert checksums(copy) == checksums(small_corpus)


def test_the_manifest_says_how_the_corpus_was_made(small_corpus):
    manifest = json.loads((small_corpus / "manifest.json").read_text())
    made = manifest["config"]
    (source,) = made["sources"]
    assert (source["name"], source["format"], source["language"]) == ("c4", "c4", "en")
    assert source["options"] == {"max_record_bytes": 64 * 2**20}  # no option was given: this is the default
    assert (source["cleaning"]["profile"], source["cleaning"]["min_sentences_per_page"]) == ("none", 0)
    assert made["split"] == {"by": "hash", "validation_fraction": 0.05}
    documents = open_corpus(small_corpus).lineage().documents
    assert [file.name for file in documents] == [f"documents/part-{n:05d}.parquet" for n in range(3)]
    for file in documents:
        content = (small_corpus / file.name).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), sha256(content).hexdigest())
    assert manifest["code_version"] == code_version()


def test_a_manifest_that_lists_inputs_and_documents_itself_is_read_and_holds_nothing_of_them(small_corpus, tmp_path):
    """As manifests had it before lineage.parquet. Each loader process is sent the corpus."""
    copy = shutil.copytree(small_corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns(".stages"))
    manifest, lineage = json.loads((copy / "manifest.json").read_text()), open_corpus(small_corpus).lineage()
    del manifest["lineage"], manifest["sha256"]
    (copy / "lineage.parquet").unlink()
    one = vars(lineage.inputs[0])
    manifest["inputs"] = [{**one, "file": f"{number}"} for number in range(1000)]
    manifest["documents"] = [vars(file) for file in lineage.documents]
    write_json(copy / "manifest.json", manifest, sealed=True)
    corpus = open_corpus(copy)
    assert [file.file for file in corpus.lineage().inputs] == [str(number) for number in range(1000)]
    assert corpus.lineage().documents == lineage.documents
    assert verify(corpus) == []
    (copy / "documents/part-00000.parquet").unlink()
    assert verify(corpus) == [f"{copy}/documents/part-00000.parquet: missing"]
    assert len(pickle.dumps(corpus)) < 1000 * 64  # a checksum has 64 digits


def test_damaged_inputs_are_listed_with_their_place_and_the_rest_goes_on(small_corpus, tmp_path):
    """Archives cut anywhere, two dumps of a unit cut inside a page, an empty file and a picture beside whole files."""
    dump = next(SAMPLES.glob("*articles1.xml.bz2")).read_bytes()
    half = (xml := bz2.decompress(dump))[: len(xml) // 2]
    picture = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20
    files = {
        "gz/cut.json.gz": ("damaged", C4_SAMPLE.read_bytes()[:100_000]),
        "bz2/cut.xml.bz2": ("damaged", dump[:400_000]),
        "page/page.xml.gz": ("truncated", gzip.compress(half)),
        "page/start.xml.gz": ("truncated", gzip.compress(half[: len(half) // 8])),
        "c4/empty.json.gz": ("unreadable", b""),
        "c4/picture.json.gz": ("unreadable", picture),
    }
    for name, (_, content) in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_c4(tmp_path / "c4/whole.json.gz", records=30)
    kinds = {"gz": "c4", "bz2": "wikipedia", "page": "wikipedia", "c4": "c4"}
    sources = [{"format": kind, "name": name, "path": str(tmp_path / name)} for name, kind in kinds.items()]
    tokenizer, shared = trained(small_corpus), 1 << 22
    config = write_corpus_file(
        tmp_path / "corpus.yaml", sources=sources, tokenizer=tokenizer, bytes_per_shared_unit=shared
    )
    done = run_here("data-pipeline", "build", config)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    *warnings, unknown = warnings
    assert len(warnings) == 6
    assert "tokens" in unknown
    assert warnings[0].startswith("warning: gz/cut.json.gz: damaged at byte 100000 of 100000: ")
    assert warnings[1].startswith("warning: bz2/cut.xml.bz2: damaged at byte 400000 of 400000: ")
    assert warnings[2].startswith("warning: page/page.xml.gz: truncated at ")
    assert warnings[3].startswith("warning: page/start.xml.gz: truncated at ")
    assert [": unreadable at " not in line for line in warnings] == [line.endswith(KEPT) for line in warnings]
    stats = json.loads(run_here("data-pipeline", "stats", tmp_path / "corpus", "--json").stdout)
    inputs = {entry["path"]: entry for entry in stats["inputs"]}
    expected = {name: status for name, (status, _) in files.items()} | {"c4/whole.json.gz": "ok"}
    assert {path: entry["status"] for path, entry in inputs.items()} == expected
    assert all((entry["documents"] > 0) == (entry["status"] != "unreadable") for entry in inputs.values())
    assert inputs["c4/whole.json.gz"]["documents"] == 30
    lines = picture.count(b"\n") + 1
    assert stats["documents"]["dropped"]["damaged"] == lines + 2  # each line of the picture, and both pages cut
    strict = run_here("data-pipeline", "build", config, "--strict")
    assert strict.returncode == 1
    errors = strict.stderr.removeprefix("error: ").splitlines()
    assert errors == [line.removeprefix("warning: ").removesuffix(KEPT) for line in warnings]


def test_a_name_with_control_characters_is_one_line_that_no_terminal_obeys(tmp_path, capsys):
    for name in ("a\nb\x1b[31m.txt", "good.txt"):
        (tmp_path / name).write_bytes(b"Text." if name == "good.txt" else b"")
    build(plain(tmp_path, tmp_path, "text"), until="documents")
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "empty file" in line]
    assert warning.startswith(r"warning: text/a\nb\x1b[31m.txt: unreadable")


def test_a_missing_input_or_corpus_is_a_clear_line(tmp_path):
    config = write_corpus_file(tmp_path / "corpus.yaml")
    said = f"error: {tmp_path}/*.json.gz: no such file (path of source 'c4')"
    assert refused_here(2, "data-pipeline", "build", config) == said
    assert not (tmp_path / "corpus").exists()
    for command, missing in (("verify", "manifest"), ("stats", "report"), ("show", "manifest")):
        assert f"{missing}.json: no such file" in refused_here(2, "data-pipeline", command, tmp_path)


@each(
    "changed",
    [{"bad_words_fraction": 0.5}, {"bad_words": []}, {"language": {"detector": "none"}}],
)
def test_another_page_filter_reads_no_input_again(tmp_path, changed):
    """The rules for language and bad words see a page after its lines were deduplicated."""
    (tmp_path / "a.txt").write_text("A text.")
    inputs = []
    for more in ({}, changed):
        config = plain(tmp_path, tmp_path / "a.txt", "text", dedup={}, cleaning={"profile": "c4", **more})
        files = inputs_of(config).files
        inputs += [unit.inputs for unit in plan_documents(config, LocalStore(tmp_path / "corpus"), files)]
    assert len(inputs) == 2
    assert inputs[0] == inputs[1]


RULE = """
from dataclasses import replace
from typing import Literal

from data_pipeline.dedup.step import KeyStep
from data_pipeline.text.step import Rule


class Sites(KeyStep):
    step: Literal["sites"] = "sites"


class Quiet(Rule):
    step: Literal["quiet"] = "quiet"

    def apply(self, document, tally):
        return replace(document, text=document.text.lower())
"""


def install(folder: Path, version: str, offers: str) -> None:
    """A package of this version in `folder`, in place of another."""
    for earlier in folder.glob("*.dist-info"):
        shutil.rmtree(earlier)
    installed = folder / f"own-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own\nVersion: {version}\n")
    (installed / "entry_points.txt").write_text(offers)


def test_another_version_of_a_package_does_its_steps_again(tmp_path, monkeypatch):
    (tmp_path / "quiet_rules.py").write_text(RULE)
    (tmp_path / "a.txt").write_text("A text.")
    monkeypatch.syspath_prepend(tmp_path)
    quiet_rules = import_module("quiet_rules")
    inputs = []
    for version in ("1.0", "1.0", "1.1"):
        install(tmp_path, version, "[encdec_pretrain.steps]\nquiet = quiet_rules:Quiet\nsites = quiet_rules:Sites\n")
        steps = [quiet_rules.Quiet(), quiet_rules.Sites()]
        config = plain(tmp_path, tmp_path / "a.txt", "text").model_copy(update={"steps": steps})
        (unit,) = plan_documents(config, LocalStore(tmp_path / "corpus"), inputs_of(config).files)
        part = Part("a", "text", "", 1, {}, 1, checksums=["same"])
        work = dedup_stages.Work(config, [part], dedup_stages.steps_after_reading(config), [])
        (keys,) = dedup_stages.plan(work, [])
        inputs.append((unit.inputs, keys.inputs))
    assert inputs[0] == inputs[1]
    assert not {*inputs[0]} & {*inputs[2]}


class OwnTokenizer(TrainedConfig):
    model = SentencePiece
    kind: Literal["own"] = "own"

    def expected(self) -> Vocabulary:
        return SentencePieceConfig().expected()


class Inside(Objective):
    name: str = "inside"

    @property
    def raw_length(self) -> int:
        return 10


class Around(Inside):
    name: str = "around"
    of: list[Objective] = []


def test_another_version_of_a_package_does_its_tokens_and_rows_again_and_those_of_no_other_kind(tmp_path, monkeypatch):
    """A changed tokenizer may have the same files as before, and an objective has none."""
    monkeypatch.syspath_prepend(tmp_path)
    part, shipped = Part("a", "text", "", 1, {}, 1, checksums=["same"]), plain(tmp_path, tmp_path / "a.txt", "text")

    def inputs(**changes: object) -> list[str]:
        """The inputs of the units that train the tokenizer, encode a part and write a shard."""
        config = shipped.model_copy(update=changes)
        (training,) = tokenizer.plan(config.tokenizer, 0, [part])
        counts = tokenizer.TokenizerResult(1, tokenizer.Sample())
        files = {"model": Output(1, "same")}
        trained = Finished("", tokenizer.STAGE.fingerprint(training), counts, files, 0.0, 0.0)
        (encoding,) = tokens_stage.plan(config, [part], trained)
        tokenized = [Finished("", "", TokensWritten({"train": 1, "validation": 0}), {}, 0.0, 0.0)]
        (_, shard), *_ = shards.specs_of(config, LocalStore(tmp_path / "corpus"), tokenized, [], trained)
        return [training.inputs, encoding.inputs, shard]

    def of_version(version: str) -> tuple[list[str], list[str], list[str]]:
        install(
            tmp_path, version, "[encdec_pretrain.tokenizers]\nown = a:A\n[encdec_pretrain.objectives]\ninside = a:A\n"
        )
        rows = shipped.rows.model_copy(update={"objective": Around(of=[Inside()])})
        return inputs(tokenizer=OwnTokenizer()), inputs(rows=rows), inputs()

    first, again, other = of_version("1.0"), of_version("1.0"), of_version("1.1")
    assert again == first
    assert not {*first[0]} & {*other[0]}
    assert [one == two for one, two in zip(first[1], other[1], strict=True)] == [True, True, False]
    assert other[2] == first[2]


def test_a_build_ends_after_the_folder_that_until_names(tmp_path):
    write_c4(tmp_path / "c4.json.gz", records=20)
    config, made = write_corpus_file(tmp_path / "corpus.yaml"), []
    for until in ("documents", "tokenizer", "shards"):
        told = done_here("data-pipeline", "build", config, "name=two words", "--until", until)
        assert f"{tmp_path}/corpus{f'/{until}' if until != 'shards' else ''} is complete" in told
        if until != "shards":
            assert f"Next: data-pipeline build {config} 'name=two words'\n" in told
        made.append([name for name in ("documents", "tokenizer", "shards") if (tmp_path / "corpus" / name).exists()])
    assert made == [["documents"], ["documents", "tokenizer"], ["documents", "tokenizer", "shards"]]
    with (tmp_path / "corpus/.stages/driver").open() as file:
        lock(file, None)  # raises if the finished builds still claimed the corpus: other processes may build it


IMPORTED = """
import sys
from data_pipeline.config import CorpusConfig
from data_pipeline.base.config_file import load
from data_pipeline.stages.pipeline import build
build(load(sys.argv[1], [], CorpusConfig))
sys.exit(", ".join({"pandas", "torch"} & sys.modules.keys()) or None)
"""


def test_no_worker_imports_pandas_or_pytorch_which_take_more_than_a_second(tmp_path, small_corpus):
    write_c4(tmp_path / "c4.json.gz", records=20)
    corpus_file = write_corpus_file(tmp_path / "corpus.yaml", dedup={}, tokenizer=trained(small_corpus))
    done = subprocess.run([sys.executable, "-c", IMPORTED, corpus_file], capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "are unknown" not in line]  # the small tokenizer's tokens
    assert (done.returncode, lines) == (0, [])


def test_the_reason_why_no_document_is_left_is_said():
    for read, kept, dropped, said in (
        (0, 0, {}, "no document was read from the sources"),
        (5, 1, {"empty": 4}, "no document for training: 1 document left, all held out"),
        (1200, 0, {"a": 1, "b": 1199}, "no document is left of 1,200 read; dropped: b 1,199, a 1; lines dropped: c 7"),
    ):
        counts = report.DocumentCounts(read, kept, dropped), report.LineCounts(9, {"c": 7})
        assert report.why_nothing_is_left(*counts).startswith(said)


@each("content", ["", "[]", "{}", "null", "{"])
def test_a_damaged_report_is_one_line(tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    told = r"report.json: damaged: .*; rewrite it with data-pipeline build CORPUS.yaml --repair"
    with pytest.raises(UserError, match=told) as error:
        report.read(tmp_path)
    assert "\n" not in str(error.value)


def test_the_documents_of_a_folder_of_text_stay_whole_and_the_pieces_of_a_large_file_in_order(tmp_path, small_corpus):
    """Six files, one of which is cut into pieces: every file is one stretch of the rows, none is mixed with another."""
    (tmp_path / "books").mkdir()
    tokenizer = open_corpus(small_corpus).tokenizer
    books = {}
    for book in range(6):
        verses = [f"Book {book} verse {n} in the beginning.\n\n" for n in range(300 if book == 3 else 20)]
        (tmp_path / f"books/{book}.txt").write_text("".join(verses))
        books[book] = list(itertools.chain.from_iterable(tokenizer.encode(verses)))
    source = {"format": "text", "path": str(tmp_path / "books"), "options": {"max_document_bytes": 1000}}
    settings = {"sources": [source], "split": {"validation_fraction": 0}, "tokenizer": trained(small_corpus)}
    printed = done_here("data-pipeline", "build", write_corpus_file(tmp_path / "corpus.yaml", **settings))
    pieces = [row["id"] for row in documents_of(tmp_path / "corpus")]
    assert f"documents: 6 files → {len(pieces)} documents, {len(pieces)} kept" in printed.splitlines()
    assert len([identity for identity in pieces if "/3.txt/" in identity]) >= 10
    (shard,) = (tmp_path / "corpus/shards/train").iterdir()
    rows = np.concatenate([sample["tokens.npy"] for sample in samples_of(shard)]).tolist()
    for tokens in books.values():
        start = next(at for at in range(len(rows)) if rows[at : at + 8] == tokens[:8])
        found = rows[start : start + len(tokens)]
        assert found == tokens[: len(found)]
        assert len(found) == len(tokens) or start + len(tokens) < len(rows) + 34  # the last may lose its tail


def test_small_files_that_share_units_make_the_same_corpus_and_damage_to_one_costs_no_other(tmp_path, small_corpus):
    """Fourteen files, three of them damaged, in a unit for each, in a few units, and in one for each source."""
    for source in ("a", "b"):
        (tmp_path / source).mkdir()
        for number in range(7):
            name = f"{number}-x.json.gz" if number % 2 else f"{number}.json.gz"
            write_c4(tmp_path / source / name, records=9, skip=9 * number)  # both sources have the same pages
    cut = tmp_path / "a/3-x.json.gz"
    cut.write_bytes(cut.read_bytes()[:-200])
    (tmp_path / "a/4.json.gz").write_bytes(b"")
    (tmp_path / "b/5-x.json.gz").write_bytes(b"\x89PNG\r\n\x1a\n" * 99)
    sources = [{"format": "c4", "name": name, "path": str(tmp_path / name), "language": "en"} for name in ("a", "b")]
    dedup = {"urls": "newest", "lines": True, "documents": True, "minhash": True}
    settings = {"sources": sources, "dedup": dedup, "tokenizer": trained(small_corpus)}
    config = write_corpus_file(tmp_path / "corpus.yaml", **settings)
    found, written = {}, {}
    for share in (0, 40_000, 10**7):
        corpus = tmp_path / f"shared-{share}"
        done = run_here("data-pipeline", "build", config, f"output={corpus}", f"bytes_per_shared_unit={share}")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("warning: ") == 4  # three inputs, and tokens that the tokenizer doesn't know
        found[share] = report.read(corpus)
        written[share] = {path.name: path.read_bytes() for path in (corpus / "shards").rglob("*.tar")}
        checked = {file.file: file.sha256 for file in open_corpus(corpus).lineage().inputs if file.source == "a"}
        assert checked == {path.name: sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "a").iterdir()}
    units = [found[share].stages[0].units for share in found]
    assert (units[0], units[2]) == (14, 2)
    assert 2 < units[1] < 14
    for share in (40_000, 10**7):
        assert written[share] == written[0]
        for key in ("inputs", "documents", "lines", "examples", "lengths", "splits", "sources"):
            assert getattr(found[share], key) == getattr(found[0], key), key
    for share in (0, 10**7):
        traced = run_here("data-pipeline", "trace", tmp_path / f"shared-{share}", f"b/6.json.gz/{3:09d}", "--json")
        (found,) = json.loads(traced.stdout)
        assert (found["rule"], found["kept"].split("/")[0]) == ("duplicate_url", "a")
