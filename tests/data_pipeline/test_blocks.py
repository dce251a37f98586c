"""Reading blocks from bytes: the same arrays as NumPy reads, and no code is executed."""

import io

import numpy as np
import pytest
import webdataset

from data_pipeline.corpus import blocks
from tests.tables import each


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
    found = blocks.decode_block(in_tar(blocks.as_members(block)))
    assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in block.items()
    }
    rows = blocks.rows_in([found, found, found], [2, 1, 0])
    assert rows.lengths.tolist() == [6, 0, 4]
    assert rows.values[0].tolist() == [4, 5, 6, 7, 8, 9]
    assert blocks.column_in([found, found], [2, 0], "denoiser").tolist() == [2, 1]
    with pytest.raises(ValueError, match="read-only"):
        found["tokens"][0] = 1  # a view into a file


@each(
    "member",
    [
        npy(np.array([{"a": print}], dtype=object), allow_pickle=True),
        npy(np.zeros((2, 2))),
        b"no array",
        b"\x93NUMPY\x09\x00" + b"0" * 200,
    ],
)
def test_pickles_and_other_strange_members_are_refused(member):
    with pytest.raises(ValueError, match=r"expected an array|not an array|magic"):
        blocks.decode_block(in_tar({"tokens.npy": member}))


def test_bytes_that_are_no_tar_are_refused():
    with pytest.raises(ValueError, match="no member of a tar at byte 0"):
        blocks.decode_block(b"x" * 2048)
