"""Writes answers to a JSONL file, one a line. A killed command resumes where its file ends.

FILE                 the answers
FILE.command.json    what the answers depend on: weights, texts and settings; another command is refused
"""

import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from data_pipeline.base.atomic import lock, naming, write_json
from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import read_json
from data_pipeline.base.progress import Progress, track
from data_pipeline.loading.stream import differences
from pretrain.evaluate.generation.texts import Answer, Answers


def write_answers(
    path: Path,
    answers: Answers,
    fields: Callable[[int, Answer], Mapping[str, object]] = lambda number, answer: answer.fields(),
    others: Mapping[str, object] | None = None,
) -> None:
    """Writes the lines that the file lacks, and shows progress on stderr. The bytes are those of a command that was
    never killed: a last line that was cut is written again.

    `fields`: the keys and values of an answer, from its number. `others`: what they depend on beside the answers, as
    JSON. Raises UserError for a file of another command, and if another process writes the file.
    """
    with naming(path), _opened(path) as file:
        try:
            lock(file, None)
        except BlockingIOError:
            raise UserError(f"{path}: another process writes this file") from None
        _claim(path, file, {**answers.identity(), **(others or {})})
        there = _whole_lines(file)
        if there:
            print(f"{path}: has {there:,} of {len(answers):,} answers", file=sys.stderr)
        left = track(answers.following(there), Progress("generate", len(answers) - there))
        for number, answer in enumerate(left, there):
            file.write(json.dumps(fields(number, answer), ensure_ascii=False).encode() + b"\n")
            file.flush()


def read_answers(path: Path, answers: Answers) -> list[Answer]:
    """The answers in a file that `write_answers` has written."""
    found = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            read: dict[str, Any] = json.loads(line)
            found.append(Answer(**read, has_blanks=answers.has_blanks(number)))
    return found


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("ab+")
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from None


def _claim(path: Path, file: BinaryIO, command: dict[str, object]) -> None:
    """Records the command of a new file. Raises UserError if the file is of another command."""
    record = path.with_name(f"{path.name}.command.json")
    if file.seek(0, io.SEEK_END) == 0:
        write_json(record, command)
        return
    try:
        there = read_json(record, dict[str, Any])
    except FileNotFoundError:
        raise UserError(f"{path}: exists already, without {record.name}; choose another file") from None
    if found := differences(there, command):
        raise UserError(f"{path}: is of another command: {'; '.join(found)}; choose another file")


def _whole_lines(file: BinaryIO) -> int:
    """The number of whole lines; a last line that is cut is removed."""
    file.seek(0)
    count = size = 0
    for line in file:
        if line.endswith(b"\n"):
            count += 1
            size += len(line)
    file.truncate(size)
    return count
