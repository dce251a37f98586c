"""The table of all stages: what each reads and writes, and the memory that its units ask for."""

from pathlib import Path

from data_pipeline.base.local_store import LocalStore
from data_pipeline.dedup.minhash import NearDuplicates
from data_pipeline.engine.work_units import Finished, Result, Unit
from data_pipeline.stages import dedup, documents, evaluation_sets, shards, table, tokenizer, tokens
from data_pipeline.stages.inputs import inputs_of
from data_pipeline.stages.kinds import DROPPED, DUPLICATES, INPUTS, KINDS, SETS
from data_pipeline.stages.parts import Part
from tests.support.builds import plain, write_model
from tests.support.tables import each

SPANS = {"name": "span_corruption", "inputs_length": 64}


def test_each_stage_reads_what_earlier_ones_write_and_the_page_has_all():
    there = {INPUTS, SETS}
    stages = table.stages({"minhash": NearDuplicates})
    for stage in stages:
        # the keys of the first step need no earlier step's duplicates
        assert there | {DUPLICATES} >= {*stage.reads}, stage.name
        there.add(stage.writes)
    assert len({stage.name for stage in stages}) == len(stages)
    assert there | {DROPPED} == {*KINDS}  # tables that stages with steps write beside
    page = Path(__file__).parents[3] / "docs/reference/stages.md"
    assert table.as_markdown() in page.read_text()


def test_units_ask_for_the_memory_that_their_stage_declares(tmp_path):
    """150 bytes for each word of an evaluation set, which has 5 letters, and 60 where the n-grams are looked for; 3 for
    each byte of text whose lines are duplicates; 2 for each byte of a classifier's file."""
    (tmp_path / "items.txt").write_text("abcd " * 2000)
    model = write_model(tmp_path / "model.bin")
    sets = [{"name": "a", "path": str(tmp_path / "items.txt"), "format": "text"}]
    steps: list[object] = [{"step": "classifier", "path": str(model), "label": "good"}, "lines", "substrings"]
    steps.append({"step": "decontamination", "sets": sets})
    config = plain(tmp_path, tmp_path / "items.txt", "text", cleaning=None, steps=steps)
    (reading,) = documents.plan(config, LocalStore(tmp_path), inputs_of(config).files)
    assert documents.STAGE.needs(reading).memory == 2 * model.stat().st_size
    (unit,) = evaluation_sets.plan(config.searched_for)
    assert evaluation_sets.STAGE.needs(unit).memory == 2000 * 150
    part = Part("a", "text", "", 1000, {}, 1000, checksums=["same"])
    work = dedup.Work(config, [part], dedup.steps_after_reading(config), [], set_bytes=10_000)
    decided = dedup.Decided([""], "", "")
    memory = [dedup.plan(work, [decided] * number)[0].memory for number in range(4)]
    assert memory == [2500, 5500, 25_000, 20_000 + 2000 * 60]  # lines, anchors, substrings, the last stage
    assert tokenizer.STAGE.needs(Unit("", None, "")).cpus == 8


@each(
    "packing, of_two_bytes, of_four_bytes",  # by tracemalloc, of documents of 300 tokens
    [("concatenate", 4.6, 8.6), ("complete_documents", 11.6, 14.8), ("examples", 31.6, 35.6)],
)
def test_a_shard_asks_for_the_memory_that_its_packing_and_its_ids_take(tmp_path, packing, of_two_bytes, of_four_bytes):
    pairs = packing == "examples"
    objective = {"name": "text_to_text", "inputs_length": 64, "targets_length": 64} if pairs else SPANS
    for vocab_size, measured, of_tokens in ((1000, of_two_bytes, 6), (70_000, of_four_bytes, 12)):
        rows = {"packing": packing, "objective": objective, "apply_at": "build" if pairs else "load"}
        kind, trained_to = "pairs" if pairs else "text", {"vocab_size": vocab_size}
        config = plain(tmp_path, tmp_path / "a.txt", kind, rows=rows, tokenizer=trained_to)
        cut = shards.RowsSpec(tokens.TokenBucket("train", 0, 1), config, "")
        rows_of_it, memory = [Finished("", "", shards.RowsResult(1), {}, 0.0, 0.0)], list[int]()
        for number in (0, 1000):
            of_split = {"train": number}  # documents
            (unit,) = shards.plan_counts(config, [(cut, "")], of_split) or shards.plan(
                config, LocalStore(tmp_path), [(cut, "")], [], of_split, rows_of_it
            )
            memory.append(unit.memory)
        assert 0 <= memory[0] / config.tokens_per_shard - measured < 1.5
        assert memory[1] - memory[0] == 200 * 1000
        trained = Finished("", "", Result(), {}, 0.0, 0.0)
        (encoding,) = tokens.plan(config, [Part("a", kind, "", 3000, {}, 3000, checksums=["same"])], trained)
        assert encoding.memory == 1000 * of_tokens
