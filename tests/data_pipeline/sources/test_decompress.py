"""Streams are decompressed by content; a cut or a changed byte is never silent."""

import bz2
import gzip
import itertools
import random
from pathlib import Path

import fsspec
import pytest
import zstandard

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.sources import decompress as module
from data_pipeline.sources import formats
from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.record import Input, ReadStats
from tests.support.reading import flat
from tests.support.tables import each

CONTENT = b"".join(b"line %d of some text\n" % number for number in range(300))


def zstd(data: bytes) -> bytes:
    """Compresses like the command `zstd`, with a checksum."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSIONS = [gzip.compress, bz2.compress, zstd]


def content(path: Path, stored: bytes | None = None) -> bytes:
    """The decompressed content of the file, which is first written if `stored` is given."""
    if stored is not None:
        path.write_bytes(stored)
    with open_stream(str(path)) as stream:
        return stream.read()


SKIPPABLE = bytes([0x5A, 0x2A, 0x4D, 0x18, 3, 0, 0, 0]) + b"abc"  # a frame without content


@each(
    "compress, before, between, behind",
    [
        *((compress, b"", compress(b""), b"") for compress in (bytes, *COMPRESSIONS)),
        (gzip.compress, b"", bytes(512), bytes(99)),
        (zstd, SKIPPABLE, SKIPPABLE, SKIPPABLE),
    ],
)
def test_members_are_read_one_after_the_other_whatever_the_name(tmp_path, compress, before, between, behind):
    stored = before + compress(CONTENT) + between + compress(CONTENT[::-1]) + behind
    for name in ("plain", "named.gz"):
        assert content(tmp_path / name, stored) == CONTENT + CONTENT[::-1]


@each("compress", COMPRESSIONS)
def test_a_cut_at_any_byte_is_never_silent(tmp_path, compress):
    """Cuts of two members at every length, except between them, where the compressed file is a whole one."""
    path = tmp_path / "a"
    member = compress(CONTENT[:3000])
    for length in (n for n in range(4, 2 * len(member)) if n != len(member)):
        with pytest.raises(DamagedInput) as damage:
            content(path, (member * 2)[:length])
        assert damage.value.path == str(path)
        assert damage.value.position == f"byte {length} of {length}"
        assert "ends before its end marker" in damage.value.reason


@each("compress", COMPRESSIONS)
def test_a_changed_byte_and_foreign_ones_after_the_end_are_damage(tmp_path, compress):
    whole = bytearray(compress(CONTENT))
    with pytest.raises(DamagedInput, match="after the end"):
        content(tmp_path / "a", whole + b"<html>")
    whole[len(whole) // 2] ^= 0xFF
    with pytest.raises(DamagedInput, match=r"corrupt|ends before"):
        content(tmp_path / "a", whole)
    with pytest.raises(DamagedInput, match="empty file"):
        content(tmp_path / "a.gz", b"")


def test_a_path_that_cannot_be_opened_is_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match=r"a\.gz: no such file"):
        content(tmp_path / "a.gz")
    with pytest.raises(UserError, match="directory"):
        content(tmp_path)
    with pytest.raises(UserError, match="nosuchprotocol"), open_stream("nosuchprotocol://a"):
        pass


def test_content_much_larger_than_its_file_is_read_in_pieces(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(zstd(bytes(1 << 26)))
    with open_stream(str(path)) as stream:
        assert sum(len(piece) for piece in iter(lambda: stream.read(1 << 16), b"")) == 1 << 26


# --- one bit is changed

SENTENCE = "the of a miller went to mill and found that nobody had ground his corn since the flood of last winter"
CHANCE, words = random.Random(2), SENTENCE.split()
LINES = ["".join(f"{CHANCE.choice(words)} " for _ in range(30)) + str(number) for number in range(1200)]
STORED = "\n".join(LINES).encode()


def kept(path: Path | str) -> tuple[list[str], ReadStats, str]:
    """The lines that the reader of plain text yields, and its damage."""
    lines, stats = [], ReadStats()
    try:
        lines.extend(r.text for r in formats.read("text", Input(str(path), options={"sample_by": "line"}), stats))
    except DamagedInput as damage:
        return lines, stats, str(damage)
    return lines, stats, ""


@each("compress, buffered, place", itertools.product([gzip.compress, zstd], [1 << 26, 1000], ["local", "memory"]))
def test_a_member_that_fails_its_checksum_is_left_out_whole(tmp_path, monkeypatch, compress, buffered, place):
    """Also one too large to hold, which is read twice, and a remote one, which is copied for it."""
    monkeypatch.setattr(module, "_BUFFERED", buffered)
    first, second = (compress("".join(f"{line}\n" for line in lines).encode()) for lines in (LINES[:100], LINES[100:]))
    url = f"memory://flips/{buffered}" if place == "memory" else str(tmp_path / "a")
    damaged = bytearray(second)
    damaged[-6 if compress is gzip.compress else -2] ^= 1  # in the checksum
    for stored, lines in ((first + second + first, LINES + LINES[:100]), (first + damaged, LINES[:100])):
        with fsspec.open(url, "wb") as file:
            file.write(stored)
        found, stats, damage = kept(url)
        assert found == lines
        assert flat(stats.counters) == {"read": len(lines)}
    end = len(first) + len(damaged)
    checked = range(end - 8, end + 1)  # the checksum was compared here
    assert damage.startswith(f"{url}: damaged at bytes {len(first)} to ")
    assert int(damage.split(" to ")[1].split()[0]) in checked
    assert f" of {end}: corrupt " in damage
    assert damage.endswith("; which byte is wrong can't be known, so all records from there on are left out")


@each("compress", [gzip.compress, zstd])
def test_a_large_member_that_is_cut_off_is_read_up_to_the_cut(tmp_path, monkeypatch, compress):
    monkeypatch.setattr(module, "_BUFFERED", 1000)
    (tmp_path / "a").write_bytes(compress(STORED)[:-1])
    lines, _, damage = kept(tmp_path / "a")
    assert lines == LINES[: len(lines)]
    assert len(lines) >= len(LINES) - 1
    assert "ends before its end marker" in damage
