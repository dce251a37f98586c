"""The directory of a run in the memory of a node: whose it may be, and how long it stays."""

import os
import threading
from pathlib import Path

import pytest

from pretrain.checkpoint.directory import release_memory, remove_left_in_memory
from pretrain.run import node_memory


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run's directory, on a node whose memory is a folder."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(node_memory, "_MEMORY", tmp_path / "memory")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_directory_that_others_can_write_to_or_that_is_a_link_is_never_used(run, tmp_path):
    names = []
    for spoil in ("mode", "link", "owner", None):
        found = node_memory.path(run)
        assert found is not None
        names.append(found.name)
        if spoil == "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700, exist_ok=True)
            found.symlink_to(tmp_path / "elsewhere")
        elif spoil:
            found.mkdir(mode=0o700)
            if spoil == "mode":
                found.chmod(0o777)
            elif os.getuid() == 0:
                os.chown(found, 12345, -1)
            else:
                found.chmod(0o750)
    assert len(set(names)) == 4
    ranks = node_memory.for_ranks(run)
    assert ranks.parent.name == names[-1]
    assert not list((tmp_path / "elsewhere").iterdir())


def held(run: Path, step: int) -> Path:
    """The directory in memory, with a checkpoint of `step`, and without a supervisor that lives."""
    node = node_memory.for_ranks(run).parent
    for ranks in node.glob("ranks-*"):
        ranks.rmdir()
    (node / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (node / "checkpoints/.slot-1").mkdir()
    return node


def test_what_is_newer_than_the_disk_outlives_the_run(run):
    node = held(run, 40)
    for on_disk in (None, 30):
        if on_disk:
            (run / f"checkpoints/step-{on_disk:08d}").mkdir(parents=True)
        assert "step 40 is in memory" in (release_memory(run) or "")
        assert node.exists()
    (run / "checkpoints/step-00000040").mkdir()
    assert release_memory(run) is None
    assert not node.exists()


def test_the_next_run_removes_what_a_killed_one_has_left_unless_it_is_newer_than_its_disk(run, tmp_path):
    newer, gone, used = held(run, 40), held(tmp_path / "gone", 40), held(tmp_path / "used", 40)
    (used / f"ranks-{os.getpid()}-x").mkdir()
    remove_left_in_memory()
    assert (newer.exists(), gone.exists(), used.exists()) == (True, False, True)
    (run / "checkpoints/step-00000041").mkdir(parents=True)
    remove_left_in_memory()
    assert not newer.exists()


@pytest.mark.parametrize("remove", [lambda _: remove_left_in_memory(), release_memory])
def test_an_attempt_that_begins_while_its_directory_is_removed_keeps_its_own(run, monkeypatch, remove):
    """It begins once the other supervisor has seen that nobody uses the directory."""
    held(run, 40)
    (run / "checkpoints/step-00000040").mkdir(parents=True)
    used, made = node_memory.is_used, list[Path]()
    beginning = threading.Thread(target=lambda: made.append(node_memory.for_ranks(run)))

    def is_used(node: Path) -> bool:
        found = used(node)
        beginning.start()
        beginning.join(0.5)  # it waits for the lock; without one, it would be done
        return found

    with monkeypatch.context() as patch:
        patch.setattr(node_memory, "is_used", is_used)
        remove(run)
    beginning.join()
    assert made[0].is_dir()


def test_the_end_of_a_run_leaves_what_the_same_command_has_begun_with(run):
    node = held(run, 40)
    (run / "checkpoints/step-00000040").mkdir(parents=True)
    ranks = node_memory.for_ranks(run)
    assert release_memory(run) is None
    assert ranks.is_dir()
    assert node.exists()
