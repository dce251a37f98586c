"""Errors that may be a node's fault."""

import gzip
from pathlib import Path

import pytest

from data_pipeline.base.errors import StoreUnavailable, UserError, may_be_of_node


def in_other_words(path: Path) -> None:
    try:
        gzip.decompress(path.read_bytes())
    except OSError:
        raise UserError(f"{path}: can't be read") from None


def test_a_file_that_another_node_may_see_is_told_from_one_with_wrong_content(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    for name, of_node in {"a.gz": False, "b.gz": True}.items():
        with pytest.raises(UserError) as told:
            in_other_words(tmp_path / name)
        assert may_be_of_node(told.value) is of_node
    assert may_be_of_node(StoreUnavailable("away"))
    assert not may_be_of_node(ZeroDivisionError())
