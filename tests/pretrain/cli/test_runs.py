"""`pretrain plan`: what it prints, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from data_pipeline.base.errors import UserError
from pretrain.cli import app
from tests.support.tables import each

RUNS = Path(__file__).parents[3] / "configs/runs"
BASE = RUNS / "t5-v1.1-base-c4.yaml"
ASKED = ("--gpus", 8, "--gpu", "a100-80gb")


def run_plan(*arguments: object) -> None:
    app(["plan", *map(str, arguments)], standalone_mode=False)


def test_several_numbers_of_gpus_are_a_table_and_the_figures_are_for_programs_too(capsys):
    """Communication of one step on 8, as in `test_communication_is_what_links_carry`, on top of the arithmetic."""
    run_plan(BASE, "--gpu", "a100-80gb", "--gpus", "8,64")
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert (head, titles.split()) == (
        "t5-v1.1-base-c4 on a100-80gb, stage 1:",
        ["GPUs", "nodes", "rows", "each", "s/step", "MFU", "time", "cost"],
    )
    assert [row.split()[:3] for row in rows[:2]] == [["8", "1", "16"], ["64", "8", "2"]]
    run_plan(BASE, "--gpu", "a100-80gb", "--gpus", "8,64", "--json")
    few, many = json.loads(capsys.readouterr().out)
    assert (few["gpus"], many["rows_per_gpu"], many["nodes"]) == (8, 2, 8)
    sent = 6 * 247_577_856 * 7 / 8 / 300e9
    arithmetic = 128 * few["flops_per_row"] / (8 * 0.31 * 312e12)
    assert few["run"]["communication"] == pytest.approx(sent)
    assert few["run"]["seconds"] == pytest.approx(arithmetic + sent)
    assert few["run"]["hours"] == pytest.approx(65_536 * (arithmetic + sent) / 3600)
    assert few["cost"] == pytest.approx(8 * 2 * few["run"]["hours"])
    assert few["mfu_in_all"] == pytest.approx(0.31 * arithmetic / (arithmetic + sent))
    assert [(one["stage"], one["recomputed"]) for one in few["options"]] == [
        (stage, recomputed) for stage in (1, 2, 3) for recomputed in (False, True)
    ]


def test_a_gpu_of_ones_own_is_given_by_its_figures(capsys):
    """1,000 TFLOP/s and 50 GB/s to other GPUs, in a node and between nodes."""
    own = ("--gpu-tflops", 1000, "--gpu-memory", 20, "--gpu-bandwidth", 50)
    run_plan(BASE, "--gpu", "mine", "--gpus", "8,16", *own, "--json")
    few, many = json.loads(capsys.readouterr().out)
    assert few["gpu"] == "mine"
    assert few["usable_bytes"] == 0.9 * (20 - 1.5) * 2**30
    for plan in (few, many):
        sent = 6 * 247_577_856 * (plan["gpus"] - 1) / plan["gpus"]
        arithmetic = 128 * plan["flops_per_row"] / (plan["gpus"] * 0.31 * 1000e12)
        assert plan["run"]["communication"] == pytest.approx(sent / 50e9)  # the link, slower than eight adapters
        assert plan["run"]["seconds"] == pytest.approx(arithmetic + sent / 50e9)


SCALING = (RUNS.parents[1] / "docs/results/plans.md").read_text(encoding="utf-8")
PLANS = re.findall(r"(?s)\n    pretrain plan (configs\S+ [^\n]*)\n\n(?:Its table:\n\n)?```\n(.*?)```", SCALING)
assert len(PLANS) == 4


@each("command, shown", [pytest.param(*plan, marks=[pytest.mark.slow] if "11b" in plan[0] else []) for plan in PLANS])
def test_the_tables_in_the_docs_are_what_the_command_prints(command, shown, capsys):
    """All of it; or, without the first lines, tables from it with blank lines between them."""
    path, *arguments = command.split()
    run_plan(RUNS.parents[1] / path, *arguments)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    if shown.startswith(printed.splitlines()[0]):
        assert shown == printed
    assert [table for table in shown.strip().split("\n\n") if table not in printed] == []


@each(
    "given, message",
    [
        (["--gpus", 8, "--gpu", "a100"], "--gpu: 'a100' isn't known; choose a100-40gb, a100-40gb-pcie, a100-80gb, "),
        ([*ASKED, "--gpu-tflops", 400], "--gpu-tflops, --gpu-memory, --gpu-bandwidth: give all three or none"),
        (["--gpu", "a100-80gb", "--gpus", "8,x"], "--gpus: '8,x'; expected a number, or several such as 8,16,64"),
        (["--gpu", "a100-80gb", "--gpus", "0"], "--gpus: '0'; expected a number"),
        (["--gpu", "a100-80gb", "--gpus", "8,16", "--nodes", 1], "--nodes: for one number of --gpus"),
        ([*ASKED, "--nodes", 3], "--gpus: 8 can't be divided evenly among 3 nodes"),
        (
            [*ASKED, "--gpus", 48],
            "--gpus: batch.global_batch_size: 128 rows can't be divided evenly among 48 ranks",
        ),
        (
            ["--gpus", 8, "--gpu", "a100-80gb", "data.train.0.corpus=nowhere", "data.validation.0.corpus=nowhere"],
            "data.objective: not set, and nowhere, which would give it, is not found",
        ),
    ],
)
def test_bad_input_gets_one_line(given, message):
    with pytest.raises(UserError) as raised:
        run_plan(BASE, *given)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.exit_code == 2
