"""The arguments that a run file gives to the callbacks, and the settings of earlier versions."""

from typing import Any

import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from pretrain.config import RunConfig
from pretrain.config.run_config import CallbackSection
from pretrain.training.callbacks import users_callbacks
from tests.support.runs import run_file
from tests.support.tables import each


@each(
    "name, arguments, said",
    [
        ("Replay", {"every_steps": 0}, "every_steps: expected an integer > 0 or auto, got 0"),
        ("MemoryChecksums", {"every_steps": True}, "every_steps: expected an integer > 0 or auto, got True"),
        ("Stragglers", {"factor": 1}, "factor: expected a number > 1, got 1"),
        ("Stragglers", {"factor": "2"}, "factor: expected a number > 1, got '2'"),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: dict[str, Any], said: str) -> None:
    section = CallbackSection(name=f"fault_hunting:{name}", **arguments)
    with pytest.raises(UserError) as error:
        users_callbacks([section])
    assert str(error.value) == f"callbacks.0: fault_hunting:{name} can't be made: ValueError: {said}"


def test_settings_of_earlier_versions_are_ignored_as_they_were_by_default_and_else_refused(small_corpus, tmp_path):
    defaults = {"replay_every_steps": "auto", "checksum_every_steps": "auto", "straggler_factor": 1.3}
    config = load(run_file(tmp_path / "defaults", small_corpus, faults=defaults), [], RunConfig)
    assert config.callbacks == []
    said = r"faults\.straggler_factor: gone; leave it out, or name the callback fault_hunting:Stragglers \(examples/"
    with pytest.raises(UserError, match=said):
        load(run_file(tmp_path / "changed", small_corpus, faults={"straggler_factor": 1.5}), [], RunConfig)
