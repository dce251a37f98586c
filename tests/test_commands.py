"""What all commands of the three packages have in common."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import data_pipeline.cli
import launch.cli
import pretrain.cli
from tests.tables import each

APPS = {"data-pipeline": data_pipeline.cli.app, "pretrain": pretrain.cli.app, "launch": launch.cli.app}


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The words that call `command` and each command below it that --help lists."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from commands(below, (*words, name))


ALL = [words for name, app in APPS.items() for words in commands(typer.main.get_command(app), (name,))]


@each("words", ALL)
def test_help_ends_with_an_example_that_the_command_accepts(words):
    shown = CliRunner().invoke(APPS[words[0]], [*words[1:], "--help"], env={"COLUMNS": "1000"}).output
    assert len(re.findall(r"^ *Example: ", shown, re.MULTILINE)) == 1
    example = shlex.split(shown.strip().splitlines()[-1].strip().removeprefix("Example: "))
    assert tuple(example[: len(words)]) == words
    assert [name for name in example if name.startswith("configs/") and not Path(name).exists()] == []
    command, given = typer.main.get_command(APPS[words[0]]), example[1:]
    while isinstance(command, TyperGroup):
        command, given = command.commands[given[0]], given[1:]
    command.make_context("", given)  # refuses options and arguments that don't exist


def test_every_package_has_its_commands():
    some = [("data-pipeline", "fetch", "wet"), ("pretrain", "train"), ("launch", "slurm")]
    assert [words for words in some if words not in ALL] == []
