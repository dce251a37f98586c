"""The loader: its order is computed, and the same for every number of ranks and workers. Streams that are cut anywhere
and continued by other ranks, and damaged blocks."""

import hashlib
import itertools
import json
import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.atomic import write_json
from data_pipeline.base.errors import DamagedInput, FailedError, UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.loading import reader
from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import TrainingBatches, in_few_widths, validation_batches
from data_pipeline.loading.reader import Reader, is_on_own_disk
from data_pipeline.loading.stream import Skipped, Stream, StreamState
from tests.support.builds import flip
from tests.support.example_rows import as_lists
from tests.support.tables import each

LONG_SPANS = SpanCorruption(inputs_length=22, noise_density=0.5, mean_span_length=5.0)  # of rows of 34, as the corpus
SHORT_ROWS = SpanCorruption(inputs_length=15, noise_density=0.3, mean_span_length=3.0)  # of rows of 17


def stream_of(*corpora: Path, **changes) -> Stream:
    opened = [open_corpus(corpus) for corpus in corpora]
    return Stream(opened, [1.0, 0.4][: len(opened)], **{"seed": 3, "lanes": 8, **changes})


def samples(stream, ranks, micro_batch, accumulation, start, steps):
    """(corpus, epoch, row) of every sample of `steps` steps, gathered from all ranks, and the position after them."""
    layouts = [BatchLayout(rank, ranks, micro_batch, accumulation) for rank in range(ranks)]
    size = layouts[0].rows(accumulation)
    begins = range(start.position, start.position + steps * size, size)
    row_offsets = [first for begin in begins for layout in layouts for first in layout.row_offsets(begin, accumulation)]
    positions = np.add.outer(np.array(row_offsets, dtype=np.int64), np.arange(micro_batch)).ravel()
    ids = np.stack(TrainingBatches(stream, layouts[0], start).row_ids(positions), axis=1)
    return ids.tolist(), StreamState.at(stream, start.position + steps * size, [])


@pytest.fixture(scope="module")
def two_corpora(small_corpus, corpus_built_with_noise) -> tuple[Stream, list[list[int]]]:
    """A stream, and its samples in order."""
    stream = stream_of(small_corpus, corpus_built_with_noise)
    return stream, samples(stream, 1, 2400, 1, StreamState.at(stream, 0, []), 1)[0]


RUNS = st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 5), st.integers(1, 3), st.integers(0, 4))


@settings(max_examples=40, deadline=None)
@given(runs=st.lists(RUNS, min_size=1, max_size=5))
def test_samples_go_on_wherever_a_run_is_cut_and_whoever_takes_it_up(two_corpora, runs):
    """The runs differ in ranks, micro-batches and global batch sizes; each continues the previous one."""
    stream, whole = two_corpora
    found, progress = [], StreamState.at(stream, 0, [])
    for ranks, micro_batch, accumulation, steps in runs:
        ids, progress = samples(stream, ranks, micro_batch, accumulation, progress, steps)
        found += ids
        progress = StreamState(**json.loads(json.dumps(asdict(progress))))  # as a checkpoint keeps it
    assert progress.position == len(found)
    assert found == whole[: len(found)]
    assert progress.consumed == [sum(corpus == number for corpus, _, _ in found) for number in (0, 1)]


def batches_of(stream: Stream) -> list[list[tuple[list[int], list[int]]]]:
    """The inputs and targets of each row, without padding, of five batches of 16."""
    found = []
    for (batch,) in TrainingBatches(stream, BatchLayout(0, 1, 16, 1)).loader(5, 0):
        inputs = ([token for token in row if token] for row in batch["encoder_input_ids"].tolist())
        targets = ([token for token in row if token != IGNORE_INDEX] for row in batch["labels"].tolist())
        found.append(list(zip(inputs, targets, strict=True)))
    return found


def test_a_curriculum_gives_the_first_rows_another_objective(small_corpus):
    """Also where the first stage ends within a micro-batch."""
    own = stream_of(small_corpus)
    other = replace(own, corpora=[corpus.with_objective(LONG_SPANS) for corpus in own.corpora])
    both = replace(own, curriculum=((40, LONG_SPANS),))
    own_rows, other_rows, rows = (list(itertools.chain(*batches_of(stream))) for stream in (own, other, both))
    assert own_rows[0] != other_rows[0]
    assert rows == other_rows[:40] + own_rows[40:]


def test_a_curriculum_of_shorter_rows_cuts_each_row(small_corpus):
    """Of 34 tokens, into two of 17, with noise of their own. The stage ends within a micro-batch."""
    own = stream_of(small_corpus)
    (corpus,) = own.corpora
    parts, rest = divmod(corpus.manifest.rows.raw_length, SHORT_ROWS.raw_length)
    assert (parts > 1, rest) == (True, 0)
    own_rows, rows = batches_of(own), batches_of(replace(own, curriculum=((40, SHORT_ROWS),)))
    assert [len(batch) for batch in rows] == [16 * parts, 16 * parts, 8 * parts + 8, 16, 16]
    assert rows[2][8 * parts :] == own_rows[2][8:]
    assert rows[3:] == own_rows[3:]
    sentinels = set(corpus.tokenizer.vocabulary.sentinel_ids)
    whole, cut = ([whole_text(*row, sentinels) for batch in found[:2] for row in batch] for found in (own_rows, rows))
    assert [list(itertools.chain(*cut[first : first + parts])) for first in range(0, len(cut), parts)] == whole


def whole_text(inputs, targets, sentinels):
    """The tokens of a row: those of the inputs, with each sentinel replaced by its span, and without EOS."""
    spans, text = {}, []
    for token in targets[:-1]:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    for token in inputs[:-1]:
        text += spans[token] if token in sentinels else [token]
    return text


@each(
    "changes, said",
    [
        ({"seed": 4}, "seed is 3 there, 4 here"),
        ({"lanes": 9}, "lanes is 8 there, 9 here"),
        ({"weights": [2.0]}, "corpora.0.weight is 1.0 there, 2.0 here"),
        ({"curriculum": ((48, LONG_SPANS),)}, "curriculum.0.until_row is null there, 48 here"),
    ],
)
def test_the_state_of_another_stream_or_corpus_is_refused(small_corpus, corpus_built_with_noise, changes, said):
    stream = stream_of(small_corpus)
    other = Stream(**{**vars(stream), **changes})
    with pytest.raises(UserError, match=said):
        TrainingBatches(other, BatchLayout(0, 1, 4, 1), StreamState.at(stream, 100, []))
    there = StreamState.at(stream_of(corpus_built_with_noise), 100, [])
    with pytest.raises(UserError, match=r"corpora\.0\.fingerprint"):
        TrainingBatches(stream, BatchLayout(0, 1, 4, 1), there)


# ---- damage

WIDE = BatchLayout(0, 1, 128, 1)
STEPS = 45  # of 128 rows: more than an epoch


@pytest.fixture
def copy(small_corpus, tmp_path) -> Path:
    return Path(shutil.copytree(small_corpus, tmp_path / "corpus"))


@pytest.fixture
def lost(copy) -> dict[str, range]:
    """One flipped bit in block 1 of each split of the copy; the rows of those blocks."""
    corpus = open_corpus(copy)
    rows = {}
    for split in ("train", "validation"):
        blocks = corpus.blocks(split)
        place = min(1, len(blocks.rows) - 1)
        flip(copy / blocks.shards[blocks.shard[place]], int(blocks.offset[place]) + 700)
        rows[split] = range(int(blocks.first_row[place]), int(blocks.first_row[place] + blocks.rows[place]))
    return rows


def test_rows_of_a_damaged_block_count_for_nothing_and_all_others_are_as_ever(small_corpus, copy, lost):
    stream, whole = stream_of(copy, on_damage="skip"), stream_of(small_corpus)
    layout = BatchLayout(0, 1, 16, 1)
    batches, expected = TrainingBatches(stream, layout), TrainingBatches(whole, layout)
    steps = stream.corpora[0].rows("train") // 16 + 1
    _, _, ids = expected.row_ids(np.arange(16 * steps))
    gone = np.isin(ids, lost["train"]).reshape(steps, 16)
    assert gone.sum() >= len(lost["train"])
    for step, ((found,), (wanted,)) in enumerate(zip(batches.loader(steps, 0), expected.loader(steps, 0), strict=True)):
        assert (found["labels"][gone[step]] == IGNORE_INDEX).all()
        assert torch.equal(found["labels"][~gone[step]], wanted["labels"][~gone[step]])
        assert torch.equal(found["encoder_input_ids"][~gone[step]], wanted["encoder_input_ids"][~gone[step]])
        if gone[step].any():
            assert (found["encoder_attention_mask"].sum(dim=1) > 0).all()  # attention to padding alone has no softmax
    (skipped,) = batches.skipped
    assert skipped.shard == "shards/train/shard-00000.tar"
    assert "sha256 differs" in skipped.reason


@each(
    "damage, workers, said",
    [
        *((Path.exists, workers, "sha256 differs") for workers in (0, 2)),  # `lost` has flipped a bit
        (lambda shard: os.truncate(shard, 5000), 0, "ends at byte 5000"),
        (lambda shard: os.truncate(shard, 0), 0, "the file is empty"),
        (Path.unlink, 0, "No such file"),
    ],
)
def test_damage_stops_the_stream_and_is_named(copy, lost, damage, workers, said):
    damage(copy / "shards/train/shard-00000.tar")
    with pytest.raises(DamagedInput, match=rf"train/shard-00000\.tar.*{said}"):
        list(TrainingBatches(stream_of(copy), WIDE).loader(STEPS, workers))
    skipping = TrainingBatches(stream_of(copy, on_damage="skip"), WIDE)
    assert len(list(skipping.loader(STEPS, workers))) == STEPS
    assert all(re.search(said, one.reason) for one in skipping.skipped)
    assert skipping.skipped


@each("path, own", [("/dev/shm", True), ("/proc/self", False), ("/sys/kernel", False)])
def test_file_systems_of_unknown_kinds_are_no_disk_of_this_machine(path, own):
    assert is_on_own_disk(Path(path)) is own


def test_a_shard_on_a_shared_file_system_is_read_and_an_error_there_is_damage(small_corpus, copy, monkeypatch):
    """/proc/self/mem answers at byte 0 as a failing disk does, and can't be mapped."""
    mapped = list(TrainingBatches(stream_of(small_corpus), WIDE).loader(STEPS, 0))
    monkeypatch.setattr(reader, "_OWN_DISKS", set())
    for (one,), (other,) in zip(mapped, TrainingBatches(stream_of(copy), WIDE).loader(STEPS, 0), strict=True):
        assert torch.equal(one["labels"], other["labels"])
    shard = copy / "shards/train/shard-00000.tar"
    os.truncate(shard, 5000)
    with pytest.raises(DamagedInput, match=r"train/shard-00000\.tar.*ends before byte \d{5}$") as damaged:
        list(TrainingBatches(stream_of(copy), WIDE).loader(STEPS, 0))
    first, last = map(int, re.findall(r"\d{4,}", str(damaged.value).partition(".tar")[2]))
    assert last - first in open_corpus(copy).blocks("train").length
    shard.unlink()
    shard.symlink_to("/proc/self/mem")
    with pytest.raises(DamagedInput, match=r"train/shard-00000\.tar.*Input/output error"):
        list(TrainingBatches(stream_of(copy), WIDE).loader(STEPS, 0))
    skipping = TrainingBatches(stream_of(copy, on_damage="skip"), WIDE)
    assert len(list(skipping.loader(STEPS, 0))) == STEPS
    assert skipping.skipped


def test_a_block_that_was_skipped_stays_skipped_after_it_was_mended(small_corpus, copy, lost):
    """Otherwise a resumed run would train on other rows than an uninterrupted one."""
    stream = stream_of(copy, on_damage="skip")
    batches = TrainingBatches(stream, WIDE)
    before = list(batches.loader(STEPS, workers=2))
    progress = StreamState.at(stream, 0, batches.skipped)
    assert len(progress.skipped) == 1
    kept = json.loads(json.dumps(asdict(progress)))
    kept["skipped"] = [Skipped(**one) for one in kept["skipped"]]
    after = TrainingBatches(stream_of(small_corpus, on_damage="skip"), WIDE, StreamState(**kept)).loader(STEPS, 0)
    for (one,), (other,) in zip(before, after, strict=True):
        assert torch.equal(one["labels"], other["labels"])


def test_damage_in_held_out_text_is_passed_over_where_asked(copy, lost):
    corpus = open_corpus(copy)
    with pytest.raises(DamagedInput, match="validation"):
        list(validation_batches(corpus, BatchLayout(0, 1, 4, 1)))
    batches = list(validation_batches(corpus, BatchLayout(0, 1, 4, 1), skip_damage=True))
    counted = sum(int((batch["labels"] != IGNORE_INDEX).any(dim=1).sum()) for batch in batches)
    assert counted == corpus.rows("validation") - len(lost["validation"])


def test_a_shard_outside_the_corpus_is_refused(copy):
    table = pq.read_table(copy / "blocks.parquet")
    names = [name.replace("shards/", "../../shards/") for name in table["shard"].to_pylist()]
    pq.write_table(table.set_column(1, "shard", pa.array(names)), copy / "blocks.parquet")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["blocks"]["sha256"] = hashlib.sha256((copy / "blocks.parquet").read_bytes()).hexdigest()
    write_json(copy / "manifest.json", manifest, sealed=True)
    with pytest.raises(FailedError, match="isn't a file of this corpus"):
        open_corpus(copy).blocks("train")


def test_an_index_of_blocks_that_is_damaged_or_missing_is_named(copy):
    flip(copy / "blocks.parquet")
    with pytest.raises(FailedError, match=r"blocks\.parquet: sha256 differs from the manifest's"):
        open_corpus(copy).blocks("train")
    (copy / "blocks.parquet").unlink()
    with pytest.raises(FailedError, match=r"blocks\.parquet: can't be read: No such file"):
        open_corpus(copy).blocks("train")


# ---- order


@each("ranks, workers", [(1, 0), (2, 2)])
def test_steps_of_growing_batches_follow_one_another_in_the_stream(small_corpus, ranks, workers):
    """Steps of 4, 8 and 16 rows take the same rows as seven steps of 4, on two ranks with workers as on one without."""
    stream = Stream([open_corpus(small_corpus)], [1.0], seed=0, lanes=8)
    start = StreamState.at(stream, 48, [])
    small = [step[0] for step in TrainingBatches(stream, BatchLayout(0, 1, 4, 1), start).loader(7, 0)]
    layouts = [BatchLayout(rank, ranks, 4 // ranks, 1) for rank in range(ranks)]
    of_ranks = [list(TrainingBatches(stream, layout, start).loader([1, 2, 4], workers)) for layout in layouts]
    growing = [micro for step in zip(*of_ranks, strict=True) for rank in step for micro in rank]
    for name in small[0]:
        assert torch.equal(torch.cat([batch[name] for batch in small]), torch.cat([micro[name] for micro in growing]))


@each("workers", [0, 1])
def test_batches_in_few_widths_are_those_of_their_rows_and_padding(small_corpus, workers):
    """Rows of 32 inputs and 8 targets become 64 and, where none has more, 40 wide."""
    stream, layout = Stream([open_corpus(small_corpus)], [1.0], seed=0, lanes=8), BatchLayout(0, 1, 4, 1)
    wide = list(TrainingBatches(stream, layout, longest=(100, 40)).loader(2, workers))
    for (batch,), (one,) in zip(wide, TrainingBatches(stream, layout).loader(2, 0), strict=True):
        assert batch["encoder_attention_mask"].tolist() == [[1] * 32 + [0] * 32] * 4
        assert (batch["encoder_input_ids"].shape, batch["labels"].shape) == ((4, 64), (4, 40))
        assert torch.equal(batch["encoder_input_ids"][:, :32], one["encoder_input_ids"])
        assert torch.equal(batch["labels"][:, :8], one["labels"])
        assert (batch["labels"][:, 8:] == IGNORE_INDEX).all()


@each("inputs, targets", [(10, 100), (10, 3), (64, 3)])
def test_inputs_that_become_wider_are_masked_however_wide_the_targets_are(inputs, targets):
    batch = {"encoder_input_ids": torch.ones(2, inputs).long(), "labels": torch.ones(2, targets).long()}
    found = in_few_widths(batch, longest=(64, 128), pad=0)
    padding = 64 - inputs
    assert found["encoder_input_ids"].tolist() == [[1] * inputs + [0] * padding] * 2
    mask = found.get("encoder_attention_mask")
    assert (None if mask is None else mask.tolist()) == ([[1] * inputs + [0] * padding] * 2 if padding else None)


def test_an_epoch_ends_in_the_middle_of_a_batch_without_loss(small_corpus):
    corpus = open_corpus(small_corpus)
    rows = corpus.rows("train")
    batches = TrainingBatches(Stream([corpus], [1.0], seed=0, lanes=8), BatchLayout(0, 1, 16, 1))
    _, epochs, ids = batches.row_ids(np.arange(2 * rows))
    assert sorted(ids[epochs == 0].tolist()) == list(range(rows))
    assert sorted(ids[epochs == 1].tolist()) == list(range(rows))


@each("ranks", [1, 2, 3])
def test_validation_sees_each_row_once_on_any_number_of_ranks(small_corpus, ranks):
    corpus = open_corpus(small_corpus)
    rows = corpus.rows("validation")
    reference = as_lists(Reader(corpus, "validation").examples(np.arange(rows), 0).targets)
    counted, lengths = [], set()
    for rank in range(ranks):
        found = list(validation_batches(corpus, BatchLayout(rank, ranks, 7, 1)))
        lengths.add(len(found))
        labels = [row for batch in found for row in batch["labels"].tolist() if row[0] != IGNORE_INDEX]
        counted += [[label for label in row if label != IGNORE_INDEX] for row in labels]
    assert len(lengths) == 1  # as many batches on every rank
    assert sorted(counted) == sorted(reference)


@each("shift, start", [(0, 0), (1, 0), (5, 0), (5, 4)])
def test_validation_begins_with_any_row_and_goes_on_after_any(small_corpus, shift, start):
    """Row 0 follows the last one. Batches of the first rows may be left out."""
    corpus = open_corpus(small_corpus)
    rows, layout = corpus.rows("validation"), BatchLayout(0, 1, 4, 1)
    expected = np.roll(np.arange(rows), -shift)[start:]
    wanted = as_lists(Reader(corpus, "validation").examples(expected, 0).targets)
    labels = [row for batch in validation_batches(corpus, layout, shift=shift, start=start) for row in batch["labels"]]
    found = [[label for label in row.tolist() if label != IGNORE_INDEX] for row in labels]
    assert found == wanted + [[]] * (-len(wanted) % 4)


def test_a_row_that_is_not_in_the_split_is_refused_with_its_size(small_corpus):
    corpus = open_corpus(small_corpus)
    rows = corpus.rows("validation")
    for row in (rows, -1):
        told = f"the split validation has {rows} rows, whose ids count from 0, got row {row}"
        with pytest.raises(UserError, match=told):
            Reader(corpus, "validation").examples([0, row], 0)


def test_a_held_out_tail_is_a_shorter_row_padded_and_masked(small_corpus, corpus_built_with_noise):
    """Every held-out token is in a row, and the padding of the last row doesn't count."""
    corpus = open_corpus(small_corpus)
    rows, length = corpus.rows("validation"), corpus.objective.raw_length
    left = corpus.manifest.splits["validation"].tokens - (rows - 1) * length
    assert 2 <= left < length  # the sample's tail
    batch = next(validation_batches(corpus, BatchLayout(0, 1, rows, 1)))
    masked = (batch["labels"][-1] != IGNORE_INDEX).sum() + batch["encoder_attention_mask"][-1].sum()
    spans = (batch["labels"][-1] >= corpus.tokenizer.vocab_size).sum()
    assert masked == left + 2 * spans + 2  # each span's sentinel on both sides, and both EOS tokens
    assert batch["encoder_attention_mask"][:-1].all()
    built = next(validation_batches(open_corpus(corpus_built_with_noise), BatchLayout(0, 1, rows, 1)))
    assert all(torch.equal(built[name], batch[name]) for name in batch)


class OfFullRows(SpanCorruption):
    def accepts(self, length: int) -> bool:
        return length == self.raw_length


def test_a_row_that_another_objective_does_not_take_is_empty(small_corpus):
    corpus = open_corpus(small_corpus)
    other = OfFullRows(**LONG_SPANS.model_dump())
    rows = [0, corpus.rows("validation") - 1]  # the last one is a tail
    found = Reader(corpus.with_objective(other), "validation").examples(rows, 0)
    expected = Reader(corpus.with_objective(LONG_SPANS), "validation").examples(rows, 0)
    assert as_lists(found.inputs)[0] == as_lists(expected.inputs)[0]
    alone = Reader(corpus.with_objective(other), "validation").examples(rows[1:], 0)
    for examples, row in ((found, 1), (alone, 0)):
        assert (examples.inputs.lengths[row], examples.targets.lengths[row]) == (
            1,
            0,
        )  # EOS alone, and nothing to learn


def test_rows_that_share_their_width_hold_the_same_targets_on_any_number_of_ranks(small_corpus):
    def targets(pack: int, ranks: int) -> list[list[int]]:
        stream = Stream([open_corpus(small_corpus)], [1.0], seed=0, lanes=8, pack=pack)
        found: list[list[int]] = []
        for rank in range(ranks):
            batches = TrainingBatches(stream, BatchLayout(rank, ranks, 24 // ranks, 1))
            for step, (batch,) in enumerate(batches.loader(2, 0)):
                found += [[]] * (step == len(found))
                labels = batch["labels"]
                assert len(labels) == -(-24 // ranks // pack)
                found[step] = sorted([*found[step], *labels[labels != IGNORE_INDEX].tolist()])
        return found

    assert targets(1, 1) == targets(5, 1) == targets(5, 2) == targets(24, 1)
