"""A directory appears whole or not at all."""

import pytest

from data_pipeline.foundation.atomic import new_directory, remove_leftovers, temporary_path
from data_pipeline.foundation.errors import UserError


def test_a_new_directory_appears_when_its_block_ends(tmp_path):
    out = tmp_path / "above/out"
    with new_directory(out) as partial:
        (partial / "below").mkdir()
        (partial / "below/file").write_text("content")
        assert not out.exists()
    assert (out / "below/file").read_text() == "content"
    assert list(out.parent.iterdir()) == [out]


def test_nothing_is_left_of_a_directory_whose_block_fails(tmp_path):
    with pytest.raises(FileExistsError), new_directory(tmp_path / "out") as partial:
        partial.mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced_unless_it_is_an_empty_directory(tmp_path):
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match="exists already; choose another directory"), new_directory(taken):
            pass
    (tmp_path / "empty").mkdir()
    with new_directory(tmp_path / "empty") as partial:
        (partial / "file").touch()
    assert (tmp_path / "empty/file").exists()


def test_what_a_killed_writer_left_is_found_by_its_name(tmp_path):
    temporary_path(tmp_path / "out").mkdir()
    temporary_path(tmp_path / "file", token="1-2").touch()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []
