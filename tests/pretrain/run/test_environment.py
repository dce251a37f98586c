"""What a run records of the machines that it runs on."""

from pretrain.run import environment


def test_every_host_is_recorded_with_the_versions_that_differ():
    here = environment.this_machine()
    other = {**here, "host": "other", "versions": {**here["versions"], "torch": "0.1", "ray": ""}}
    described = environment.describe([{**here, "ranks": [0, 1]}, {**other, "ranks": [2]}])
    assert described["ranks"] == 3
    assert described["versions"] == here["versions"]
    assert [(host["host"], host["ranks"], host["versions"]) for host in described["hosts"]] == [
        (here["host"], [0, 1], {}),
        ("other", [2], {"torch": "0.1", "ray": ""}),
    ]


def test_a_node_is_recorded_by_the_name_that_slurm_has_for_it(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-3")
    assert environment.this_machine()["host"] == "gpu-3"


def test_a_password_in_uncommitted_changes_is_not_recorded(monkeypatch):
    monkeypatch.setattr(environment, "git", lambda *_: "+uri: https://me:hunter2@host\n")
    assert environment.describe([environment.this_machine()])["git"]["diff"] == "+uri: https://me:***@host\n"


def test_the_state_of_the_source_tree_is_what_mlflow_calls_it(monkeypatch):
    answers = {
        "rev-parse": "c0ffee\n",
        "symbolic-ref": "main\n",
        "remote": "https://me:pw@host/x.git\n",
        "diff": "a.py\n",
    }
    monkeypatch.setattr(environment, "git", lambda command, *_: answers[command])
    assert environment.git_tags() == {
        "mlflow.source.git.commit": "c0ffee",
        "mlflow.source.git.branch": "main",
        "mlflow.source.git.repoURL": "https://host/x.git",
        "mlflow.source.git.dirty": "true",
    }
    monkeypatch.setattr(environment, "git", lambda *_: "")
    assert environment.git_tags() == {}  # an installed package
