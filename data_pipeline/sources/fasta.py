"""FASTA: sequences of residues (of proteins, DNA or RNA), each below a header, a line that begins with `>`."""

from collections.abc import Iterator
from typing import BinaryIO

from data_pipeline.base.errors import DamagedInput
from data_pipeline.sources.format import Beginning, Format
from data_pipeline.sources.record import Input, ReadStats, Record, TextOptions, decode, numbered_lines, open_text


class Options(TextOptions):
    """The `options` of a source of sequences."""

    upper: bool = False
    """Change residues to upper case: `acGT` becomes `ACGT`. In a soft-masked genome, repeats are in lower case."""


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    r"""Every sequence as one text without white space; the ordinal is the sequence's index.

    The title is the header: identifier and description. A record has no URL, since identifiers such as `contig_1` are
    unique only in their file. Letters keep their case, unless `upper` is set. Counts `read` and `empty` (a header
    without residues, dropped). A sequence in another encoding, or with more than `max_record_bytes` residues, is
    damage. Raises `DamagedInput` if no header comes first.

        b">P1 Some protein\nMKTAY\nIAK*\n"  ->  Record(0, "MKTAYIAK*", title="P1 Some protein")
    """
    options = Options(**file.options)
    with open_text(file, options) as stream:
        for ordinal, (position, header, residues) in enumerate(_sequences(file.path, stream, options)):
            stats.counters.read += 1
            try:
                title = decode(header, options)
                text = decode(None if residues is None else bytes(residues), options)
            except ValueError as error:
                stats.damaged(position, str(error))
            else:
                if text:
                    yield Record(ordinal, text.upper() if options.upper else text, title=title)
                else:
                    stats.counters.document("empty", title)


def _sequences(path: str, stream: BinaryIO, options: TextOptions) -> Iterator[tuple[str, bytes, bytearray | None]]:
    """(position, header, residues) of every sequence; residues are None if they are too long."""
    position, header = "", b""
    residues: bytearray | None = None
    for number, line in numbered_lines(stream, options.max_record_bytes):
        if line is not None and line.startswith(b">"):
            if position:
                yield position, header, residues
            position, header, residues = f"line {number}", line[1:].strip(), bytearray()
        elif not position and (line is None or line.strip()):
            raise DamagedInput(path, f"line {number}", _why_no_header(line, options))
        elif line is None:
            residues = None
        elif residues is not None:
            residues += b"".join(line.split())
            if len(residues) > options.max_record_bytes:
                residues = None
    if position:
        yield position, header, residues


def _why_no_header(line: bytes | None, options: TextOptions) -> str:
    try:
        decode(line, options)
    except ValueError as error:
        return str(error)
    return "expected a header, a line that begins with >"


class Fasta(Format):
    """Sequences of residues."""

    options, refuses_others = Options, True
    # headers, each above lines of letters
    beginning = Beginning(rb">[^\n]*\n(?:[A-Za-z*.-]+[ \t\r]*\n)++(?:>|\Z)", "FASTA", also=("text",))
    read = staticmethod(read)
