"""How documents become rows, by hand and for all documents, and how blocks of rows are read without executing code."""

import io
import tarfile
import tracemalloc

import numpy as np
import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.corpus import blocks, packing
from data_pipeline.corpus.example_rows import balanced, best_fit, in_rows
from data_pipeline.corpus.objectives.language_modelling import CausalLM
from data_pipeline.corpus.objectives.objective import Examples, Padded, together
from data_pipeline.corpus.objectives.randomness import row_keys
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.corpus.objectives.ul2 import UL2
from data_pipeline.corpus.packing import PACKINGS, Documents, Rules
from data_pipeline.text.vocabulary import Vocabulary
from tests.support.tables import each

EOS, STOP = 1, 9  # the token 9 ends a sentence
SENTENCE_ENDS = np.arange(1000) == STOP
VOCABULARY = Vocabulary(1000, (3, 900), pad=0, eos=EOS, unk=2, sentence_ends=SENTENCE_ENDS)


def documents(*texts, targets=None):
    flat = np.concatenate([np.array(text, dtype=np.uint16) for text in texts])
    starts = np.cumsum([0, *map(len, texts)])
    return Documents(flat, starts, None if targets is None else np.array(targets))


def pack(packing, given_documents, objective, keep_tail=True):
    return PACKINGS[packing](given_documents, Rules(objective, VOCABULARY, keep_tail, "train/0-of-1", seed=0))


def rows_of(rows):
    return [rows.tokens[start:end].tolist() for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]


def test_documents_are_laid_end_to_end_and_the_tail_is_dropped_or_kept():
    three = documents([3, 4, 5], [6, 7], [8, 10, 11])
    kept = pack("concatenate", three, CausalLM(length=2))  # rows of 3: two inputs, two targets
    assert rows_of(kept) == [[3, 4, 5], [6, 7, 8], [10, 11]]
    assert kept.documents.tolist() == [0, 3, 5]
    dropped = pack("concatenate", three, CausalLM(length=2), keep_tail=False)
    assert rows_of(dropped) == [[3, 4, 5], [6, 7, 8]]
    assert (kept.dropped, dropped.dropped) == (0, 2)


def test_a_tail_that_makes_no_example_is_dropped_also_where_tails_are_kept():
    rows = pack("concatenate", documents([3, 4, 5, 6, 7, 8, 10]), CausalLM(length=2))
    assert rows_of(rows) == [[3, 4, 5], [6, 7, 8]]
    assert rows.dropped == 1  # there is no next token to predict


@each("keep_tail", [True, False])
@each("tokens", range(40, 60))
def test_rows_of_a_mixture_have_the_lengths_of_the_drawn_denoisers(tokens, keep_tail):
    infilling = [{"denoiser": {"name": "infilling", "length": length}} for length in (5, 10)]  # rows of 4 and 9 tokens
    mixture = UL2.model_validate({"denoisers": infilling})
    rows = pack("concatenate", documents(range(3, 3 + tokens)), mixture, keep_tail)
    drawn = mixture.draw(row_keys(0, "denoiser/train/0-of-1", 0, np.arange(99))).tolist()
    lengths, left = [], tokens
    for denoiser in drawn:
        if left < (4, 9)[denoiser]:
            break
        lengths.append((4, 9)[denoiser])
        left -= lengths[-1]
    if keep_tail and left:
        lengths.append(left)
        left = 0
    assert np.diff(rows.offsets).tolist() == lengths
    assert rows.columns["denoiser"].tolist() == drawn[: len(lengths)]
    assert (len(rows), rows.dropped) == (len(lengths), left)


def test_a_complete_document_is_a_row_and_a_longer_one_is_cut_at_the_last_sentence_end_that_fits():
    long = [3, STOP, 4, 5, STOP, 6, 7, 8, 10, 11, 12]
    rows = pack("complete_documents", documents([3, 4], long, [5, 5, 5, 5, 5, 5, 5]), CausalLM(length=5))  # rows of 6
    assert rows_of(rows) == [[3, 4], [3, STOP, 4, 5, STOP], [6, 7, 8, 10, 11, 12], [5] * 6]
    assert rows.dropped == 1  # the last 5 stands alone: no next token to predict
    assert rows.documents.tolist() == [0, 2, 13]


def test_whole_documents_of_a_mixture_fit_each_denoiser_and_are_drawn_one():
    denoisers = [{"denoiser": {"name": "infilling", "length": length}} for length in (5, 9)]
    mixture = UL2.model_validate({"denoisers": denoisers})
    rows = pack("complete_documents", documents([3, 4], [5, 6, 7, 8, 10, 11], *[[7, 8]] * 100), mixture)
    assert rows_of(rows)[:4] == [[3, 4], [5, 6, 7, 8], [10, 11], [7, 8]]  # rows of at most 4 tokens
    assert (
        rows.columns["denoiser"].tolist()
        == mixture.draw(row_keys(0, "denoiser/train/0-of-1", 0, np.arange(103))).tolist()
    )
    assert 30 < rows.columns["denoiser"].sum() < 75


def test_pairs_are_cut_on_each_side():
    two = documents([3, 4, 5, 6, 7, 8], [10, 11], targets=[4, 1])
    rows = pack("complete_documents", two, TextToText(inputs_length=4, targets_length=2))
    assert rows_of(rows) == [[3, 4, 5, 7], [10, 11]]  # an EOS token follows on each side
    assert rows.columns["target_start"].tolist() == [3, 1]
    assert rows.dropped == 2
    assert rows.documents.tolist() == [0, 4]
    assert (rows.cut_inputs, rows.cut_targets) == (1, 1)
    packed = pack("examples", two, TextToText(inputs_length=5, targets_length=2))
    assert (packed.cut_inputs, packed.cut_targets) == (0, 1)


def test_packed_examples_stand_behind_one_another_with_segments():
    two = documents([3, 4, 5], [6, 7], [8, 10, 11, 12], targets=[2, 1, 3])
    rows = pack("examples", two, TextToText(inputs_length=5, targets_length=4))
    packed = rows.examples
    assert packed.inputs.values.tolist() == [[3, 4, EOS, 6, EOS], [8, 10, 11, EOS, 0]]
    assert packed.input_segments.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
    assert packed.targets.values.tolist() == [[5, EOS, 7, EOS], [12, EOS, 0, 0]]
    assert packed.target_segments.tolist() == [[1, 1, 2, 2], [1, 1, 0, 0]]


def test_an_eos_token_on_each_side_takes_room():
    two = documents([3, 4], [5, 6], targets=[1, 1])
    for inputs, targets, rows in ((4, 4, 1), (4, 3, 2), (3, 4, 2)):
        packed = pack("examples", two, TextToText(inputs_length=inputs, targets_length=targets))
        assert len(packed) == rows, (inputs, targets)


def test_masks_stay_with_their_tokens_in_rows_of_examples():
    values = np.array([[3, 4, 5], [6, 7, 0]], dtype=np.uint16)
    inputs, targets = Padded(values, np.array([3, 2])), Padded(values[:, :2], np.array([2, 1]))
    prefix, predicted = (side.filled.copy() for side in (inputs, targets))
    prefix[:, 0], predicted[0, 1] = False, False
    both = Examples(inputs, targets, prefix_mask=prefix, predicted=predicted)
    packed = in_rows(both, np.array([0, 0]), np.array([1, 2]), 1, (6, 4))
    assert packed.inputs.values.tolist() == [[3, 4, 5, 6, 7, 0]]
    assert packed.prefix_mask.tolist() == [[False, True, True, False, True, False]]
    assert packed.targets.values.tolist() == [[3, 4, 6, 0]]
    assert packed.predicted.tolist() == [[True, False, True, False]]


def test_more_than_255_examples_share_a_row():
    """600 pairs, each with one token and an EOS token on both sides, fill rows of 600 tokens with 300 examples."""
    texts = [[3 + number % 5, 8] for number in range(600)]
    rows = pack("examples", documents(*texts, targets=[1] * 600), TextToText(inputs_length=600, targets_length=600))
    block = blocks.of_examples(rows.examples)
    read = blocks.examples_in([block, block], [0, 1])
    for segments in (read.input_segments, read.target_segments):
        assert segments.tolist() == [np.repeat(np.arange(1, 301), 2).tolist()] * 2


def test_rows_of_examples_are_the_same_however_many_are_made_at_once(monkeypatch):
    chance = np.random.default_rng(0)
    lengths = chance.integers(2, 12, 300)
    pairs = documents(*(chance.integers(3, 900, length) for length in lengths), targets=lengths // 2)
    made = []
    for rows_at_once in (1, 7, 1000):
        monkeypatch.setattr(packing, "_ROWS_AT_ONCE", rows_at_once)
        made.append(pack("examples", pairs, TextToText(inputs_length=20, targets_length=20)).examples)
    assert len(made[0].inputs.lengths) > 7
    for one in made[:2]:
        for name in ("inputs", "targets"):
            for array, expected in zip(getattr(one, name), getattr(made[2], name), strict=True):
                assert (array.dtype, array.tolist()) == (expected.dtype, expected.tolist())
        for name, array in made[2].optional.items():
            assert (one.optional[name].dtype, one.optional[name].tolist()) == (array.dtype, array.tolist())


def test_one_long_pair_among_short_ones_takes_little_memory(monkeypatch):
    """20,000 pairs as wide as the longest are 20,000 x 900 tokens of 2 bytes, which were held several times."""
    monkeypatch.setattr(packing, "_ROWS_AT_ONCE", 4)
    texts = [[5] * 900, *[[3, 4]] * 20_000]
    pairs = documents(*texts, targets=[450] + [1] * 20_000)
    tracemalloc.start()
    pack("examples", pairs, TextToText(inputs_length=500, targets_length=500))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000 * 900 * 2 / 2


def test_rows_of_few_and_of_many_examples_are_put_together():
    few, many = np.full((1, 4), 2, dtype=np.uint8), np.full((1, 4), 300, dtype=np.uint16)
    side = Padded.full(np.ones((1, 4), dtype=np.uint16))
    parts = [
        (np.array([place]), Examples(side, side, input_segments=segments, target_segments=segments))
        for place, segments in enumerate((few, many))
    ]
    assert together(parts, pad=0).input_segments.tolist() == [[2] * 4, [300] * 4]


def test_an_example_goes_where_it_leaves_least_room():
    """An example goes into the fullest row that it fits into: 4 + 2 rather than 3 + 2."""
    row, segment = best_fit(np.array([[4, 1], [3, 1], [2, 1]]), (6, 6))
    assert row.tolist() == [0, 0 + 1, 0]
    assert segment.tolist() == [1, 1, 2]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=60))
def test_best_fit_overfills_no_row_and_numbers_segments_without_gaps(sizes):
    sizes = np.array(sizes)
    row, segment = best_fit(sizes, (12, 9))
    assert sorted(set(row.tolist())) == list(range(row.max() + 1))
    for number in range(row.max() + 1):
        assert (sizes[row == number].sum(axis=0) <= [12, 9]).all()
        assert segment[row == number].tolist() == list(range(1, (row == number).sum() + 1))


@each("packing", ["concatenate", "complete_documents"])
def test_no_documents_make_no_rows(packing):
    rows = pack(packing, Documents(np.zeros(0, np.uint16), np.zeros(1, np.int64)), SpanCorruption())
    assert len(rows) == 0


def test_no_pairs_make_no_rows_of_examples():
    none = Documents(np.zeros(0, np.uint16), np.zeros(1, np.int64), np.zeros(0, np.int64))
    rows = pack("examples", none, TextToText(inputs_length=5, targets_length=4))
    assert (len(rows), len(none), len(rows.examples.inputs.lengths)) == (0, 0, 0)


def one_each(*sizes: tuple[int, int]) -> Examples:
    """Examples whose inputs and targets have these `sizes`; each consists of a number of its own."""
    sides = []
    for lengths in zip(*sizes, strict=True):
        side = Padded(np.zeros((len(sizes), max(lengths)), dtype=np.uint16), np.array(lengths))
        side.values[side.filled] = np.repeat(np.arange(len(sizes)), lengths)
        sides.append(side)
    return Examples(*sides)


def test_examples_are_shared_out_over_rows_of_like_length():
    """The longest first, each into the shortest row: 9 | 8, then 8 + 5, 9 + 4."""
    packed = balanced(one_each((3, 2), (6, 3), (4, 4), (3, 1)), 2)
    first, second = [1] * 6 + [3] * 3, [2] * 4 + [0] * 3
    assert [row[:9].tolist() for row in packed.inputs.values] == [first, [*second, 0, 0]]
    assert packed.inputs.values.shape == packed.targets.values.shape == (2, 64)
    assert packed.input_segments[:, :9].tolist() == [[1] * 6 + [2] * 3, [1] * 4 + [2] * 3 + [0, 0]]
    assert [row[row > 0].tolist() for row in packed.target_segments] == [[1, 1, 1, 2], [1, 1, 1, 1, 2, 2]]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=40), st.integers(1, 9))
@example([(0, 0), (0, 0)], 1)  # rows without a token are rows
def test_shared_rows_hold_every_example_whole(sizes, per_row):
    packed = balanced(one_each(*sizes), per_row)
    assert len(packed.inputs.lengths) == -(-len(sizes) // per_row)
    places = []
    for side, segments, lengths in (
        (packed.inputs, packed.input_segments, [one for one, _ in sizes]),
        (packed.targets, packed.target_segments, [one for _, one in sizes]),
    ):
        found, own = {}, {}
        for place, row in enumerate(segments):
            for segment in set(row[row > 0].tolist()):
                (number,) = set(side.values[place][row == segment].tolist())
                found[number], own[number] = (row == segment).sum(), (place, segment)
        assert found == {number: length for number, length in enumerate(lengths) if length}
        places.append(own)
    inputs, targets = places
    both = inputs.keys() & targets.keys()  # they stand in the same segment of the same row
    assert [inputs[number] for number in both] == [targets[number] for number in both]


def test_rows_that_hold_several_examples_already_stay_as_they_are():
    shared = balanced(one_each((3, 2), (4, 1)), 2)
    assert balanced(shared, 2) is shared


def in_tar(members):
    out = io.BytesIO()
    with webdataset.TarWriter(out, mtime=0) as writer:
        writer.write({"__key__": "000000000000", **members})
        length = writer.tarstream.offset
    return out.getvalue()[:length]


def npy(array, **options):
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def test_a_block_is_read_back_as_it_was_written():
    tokens, offsets = np.arange(10, dtype=np.uint16), np.array([0, 4, 4, 10])
    block = blocks.of_rows(tokens, offsets, np.array([0, 5]), {"denoiser": np.array([1, 0, 2], dtype=np.uint8)})
    written = in_tar({f"{name}.npy": values for name, values in block.items()})
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w|") as tar:
        blocks.add(tar, block, 0)
        length = tar.offset
    assert shard.getvalue()[:length] == written
    found = blocks.decode_block(written)
    plain, expected = ({name: (a.dtype, a.tolist()) for name, a in of.items()} for of in (found, block))
    assert plain == expected
    rows = blocks.rows_in([found, found, found], [2, 1, 0])
    assert rows.lengths.tolist() == [6, 0, 4]
    assert rows.values[0].tolist() == [4, 5, 6, 7, 8, 9]
    assert blocks.column_in([found, found], [2, 0], "denoiser").tolist() == [2, 1]
    with pytest.raises(ValueError, match="read-only"):
        found["tokens"][0] = 1  # a view into a file


def test_pickles_and_other_strange_members_and_bytes_that_are_no_tar_are_refused():
    pickled = npy(np.array([{"a": print}], dtype=object), allow_pickle=True)
    for member in (pickled, npy(np.zeros((2, 2))), b"no array", b"\x93NUMPY\x09\x00" + b"0" * 200):
        with pytest.raises(ValueError, match=r"expected an array|not an array|magic"):
            blocks.decode_block(in_tar({"tokens.npy": member}))
    with pytest.raises(ValueError, match="no member of a tar at byte 0"):
        blocks.decode_block(b"x" * 2048)
