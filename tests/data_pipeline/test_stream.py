"""Streams are decompressed by content; a cut or a changed byte is never silent."""

import bz2
import gzip
import pickle
from pathlib import Path

import pytest
import zstandard

from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.sources.compression.stream import open_stream

CONTENT = b"".join(b"line %d of some text\n" % number for number in range(300))


def zstd(data: bytes) -> bytes:
    """Compresses like the command `zstd`, with a checksum."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSIONS = [gzip.compress, bz2.compress, zstd]


def content(path: Path) -> bytes:
    with open_stream(str(path)) as stream:
        return stream.read()


@pytest.mark.parametrize("name", ["plain", "named.gz", "named.bz2", "named.zst", "x.xml"])
@pytest.mark.parametrize("compress", [bytes, *COMPRESSIONS])
def test_compression_is_told_by_content_not_by_name(tmp_path, name, compress):
    path = tmp_path / name
    path.write_bytes(compress(CONTENT))
    assert content(path) == CONTENT


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_members_are_read_one_after_the_other(tmp_path, compress):
    path = tmp_path / "a"
    path.write_bytes(compress(CONTENT) + compress(b"") + compress(CONTENT[::-1]))
    assert content(path) == CONTENT + CONTENT[::-1]


def test_gzip_may_be_padded_with_zeros(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(CONTENT) + bytes(512) + gzip.compress(CONTENT) + bytes(99))
    assert content(path) == CONTENT * 2


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("members", [1, 2])
def test_a_cut_at_any_byte_is_never_silent(tmp_path, compress, members):
    """Cuts at every length, except between members, where the compressed file is a whole one."""
    path = tmp_path / "a"
    whole = compress(CONTENT) * members
    boundary = len(whole) // members
    for length in (n for n in range(4, len(whole)) if n % boundary):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedInput) as damage:
            content(path)
        assert damage.value.path == str(path)
        assert damage.value.position == f"byte {length} of {length}"
        assert "ends before its end marker" in damage.value.reason


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_what_precedes_a_cut_is_read_first(tmp_path, compress):
    path = tmp_path / "a"
    path.write_bytes(compress(CONTENT) + compress(CONTENT)[:-1])
    with open_stream(str(path)) as stream:
        assert stream.read(len(CONTENT)) == CONTENT
        with pytest.raises(DamagedInput):
            stream.read()


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_a_changed_byte_is_damage(tmp_path, compress):
    path = tmp_path / "a"
    whole = bytearray(compress(CONTENT))
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(DamagedInput, match=r"corrupt|ends before"):
        content(path)


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_foreign_bytes_after_the_end_are_damage(tmp_path, compress):
    path = tmp_path / "a"
    path.write_bytes(compress(CONTENT) + b"<html>")
    with pytest.raises(DamagedInput, match="after the end"):
        content(path)


def test_an_empty_file_is_damage(tmp_path):
    path = tmp_path / "a.gz"
    path.touch()
    with pytest.raises(DamagedInput, match="empty file"):
        content(path)


def test_what_cannot_be_opened_is_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match=r"a\.gz: no such file"):
        content(tmp_path / "a.gz")
    with pytest.raises(UserError, match="directory"):
        content(tmp_path)
    with pytest.raises(UserError, match="nosuchprotocol"), open_stream("nosuchprotocol://a"):
        pass


def test_paths_are_fsspec_paths():
    import fsspec

    with fsspec.open("memory://folder/a.bz2", "wb") as file:
        file.write(bz2.compress(CONTENT))
    with open_stream("memory://folder/a.bz2") as stream:
        assert stream.readline() == b"line 0 of some text\n"


def test_damage_survives_the_trip_between_processes():
    damage = pickle.loads(pickle.dumps(DamagedInput("a", "byte 1", "cut")))
    assert (damage.path, damage.position, damage.reason) == ("a", "byte 1", "cut")


def test_skippable_zstandard_frames_hold_no_content(tmp_path):
    path = tmp_path / "a"
    skippable = bytes([0x5A, 0x2A, 0x4D, 0x18, 3, 0, 0, 0]) + b"abc"
    path.write_bytes(skippable + zstd(CONTENT) + skippable + zstd(CONTENT) + skippable)
    assert content(path) == CONTENT * 2


def test_content_much_larger_than_its_file_is_read_in_pieces(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(zstd(bytes(1 << 26)))
    with open_stream(str(path)) as stream:
        assert sum(len(piece) for piece in iter(lambda: stream.read(1 << 16), b"")) == 1 << 26
