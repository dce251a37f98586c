"""The trace of some steps."""

import json

from data_pipeline.base.config_file import load
from pretrain.config import RunConfig
from pretrain.training import callback
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file, train_ranks
from tests.support.tables import each


def test_the_profile_of_some_steps_is_a_trace(small_corpus, tmp_path):
    path = run_file(tmp_path, small_corpus, run={"max_steps": 11}, trainer={"profile": True})
    assert train_ranks(path, 2) == [0, 0]
    for rank in range(2):
        trace = json.loads((tmp_path / f"run/profile/rank-{rank:05d}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"aten::mm", "aten::embedding"} <= names


def profiled(path, stop, back_after):
    """The exit code of a run, which goes back to its newest checkpoint after a step, and how many steps its trace has.

    The optimizer has one group of parameters, which each step updates once.
    """
    from pretrain.engine.checkpoint.index import newest
    from pretrain.training.prepare import state_of
    from pretrain.training.run import train

    class GoesBack(callback.Callback):
        priority = 60  # before Profiling

        def after_step(self, trainer, result):
            if result.step == back_after and len(steps) == back_after - 1:
                trainer.finish_saving()
                trainer.drop_unsaved()
                checkpoint = newest(trainer.run.directory)
                trainer.rewind(checkpoint, state_of(trainer.run.directory, checkpoint))
            steps.append(result.step)

    steps = []
    code = train(load(path, [], RunConfig), stop, callbacks=[GoesBack()])
    trace = json.loads((path.parent / "run/profile/rank-00000.json").read_text())
    return code, [event.get("name") for event in trace["traceEvents"]].count("Optimizer.step#AdamW.step"), steps


@each(
    "stop, back_after, found",
    [
        (11, None, (75, 2, [*range(1, 12)])),
        (None, 12, (0, 3, [*range(1, 13), *range(9, 15)])),
    ],
)
def test_a_run_that_stops_or_goes_back_has_a_trace_of_the_steps_before(small_corpus, tmp_path, stop, back_after, found):
    """Steps 10 to 13 are profiled; those after 8 and 12 are saved."""
    settings = {"optimizer": {"learning_rate": 1e-2, "groups": []}, "batch": {"global_batch_size": 2}, "evaluation": []}
    path = run_file(tmp_path, small_corpus, run={"max_steps": 14}, trainer={"profile": True}, **settings)
    assert on_ranks(1, profiled, path, stop, back_after, joined=False) == [found]
