"""`make prove` fails where a claim doesn't hold. CI runs all of it on the code as it is."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from checks.prove import __main__ as prove
from tests.conftest import TOP

PLANTED = [
    (  # only the gradient of a step's last micro-batch counts
        "pretrain/engine/gradients.py",
        "(torch._foreach_copy_ if first else torch._foreach_add_)",
        "torch._foreach_copy_",
    ),
    (  # one token fewer is masked in most rows
        "data_pipeline/corpus/objectives/span_corruption.py",
        "np.clip(np.round(products), 1",
        "np.clip(np.floor(products), 1",
    ),
    ("docs/results/faults/ettr.csv", "30,55,0.8938", "30,55,0.9938"),
]


@pytest.mark.slow
def test_three_planted_faults_are_found_by_the_claims_that_they_break(tmp_path):
    folders = ("benchmarks", "checks", "configs", "data_pipeline", "docs", "examples")
    folders += ("experiments", "launch", "pretrain", "tests")
    for name in folders:
        shutil.copytree(TOP / name, tmp_path / "broken" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, right, wrong in PLANTED:
        path = tmp_path / "broken" / name
        assert path.read_text().count(right) == 1, name
        path.write_text(path.read_text().replace(right, wrong))
    command = [sys.executable, "-m", "checks.prove", "--seed", "1", "--only", "6,7,8,12", "--folder", tmp_path / "work"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "broken")}
    done = subprocess.run(command, cwd=tmp_path / "broken", env=environment, capture_output=True, text=True)
    told = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = re.findall(r"^ ?(\d+) .* · (PASS|FAIL) ", done.stdout, re.MULTILINE)
    assert verdicts == [("6", "FAIL"), ("7", "FAIL"), ("8", "PASS"), ("12", "FAIL")], done.stdout
    assert any(line.startswith("   look at pretrain/engine/optimizers") for line in told)
    assert told[-2].startswith("1 of 4 claims hold here")


def test_wrong_arguments_are_refused(tmp_path, capsys):
    for arguments, told in [
        (["--only", "13"], "--only has numbers from 1 to 12"),
        (["--at", "99"], "--at is 1 to"),
        (["--text", str(tmp_path / "none.txt")], "is no file"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            prove.main(arguments)
        assert stopped.value.code == 2
        assert told in capsys.readouterr().err
