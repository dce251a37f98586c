"""The progress of a run between two steps: spikes of its loss, and the counts of a run that was rewound."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np

from pretrain.config.run_config import SpikeSection
from pretrain.run.train_state import Health, Rewind, TrainState, add_rewind, after_rewinds
from tests.support.tables import each


def test_spikes_stand_out_of_a_full_window_and_leave_it_as_it_was():
    settings = SpikeSection(threshold=4.0, window=8)
    health = Health()
    for loss in (9.0, 3.1, 2.9, 3.0, 3.2, 2.8, 3.0, 3.1, 2.9):  # the first loss has left the window by the end
        health = health.after(loss, True, settings)
        assert health.spikes == 0
    after = health.after(3.8, True, settings)  # the mean is 3.0, the deviation 0.122
    assert (after.spikes, after.recent) == (1, health.recent)
    assert health.after(3.4, True, settings).spikes == 0
    skipped = health.after(float("nan"), False, settings)
    assert skipped == replace(health, skipped=1, in_a_row=1)
    assert skipped.after(float("nan"), False, settings) == replace(health, skipped=2, in_a_row=2)
    assert skipped.after(3.0, True, settings).in_a_row == 0
    assert skipped.after(3.0, True, settings).skipped == 1
    assert Health(recent=(3.0,) * 8).after(3.05, True, settings).spikes == 0  # a plateau has no deviation of its own
    assert Health(recent=(3.0,) * 8).after(3.1, True, settings).spikes == 1


def after_losses(health, losses, settings):
    """The health after each of the losses."""
    return list(itertools.accumulate(losses, lambda one, loss: one.after(loss, True, settings), initial=health))[1:]


def around(mean, steps, seed):
    """Losses within 0.02 of a mean, from keyed random numbers."""
    noise = np.random.Generator(np.random.Philox(seed))
    return (mean + noise.uniform(-0.02, 0.02, steps)).tolist()


@each("seed", range(3))
def test_a_loss_that_rises_and_stays_is_one_spike_until_it_fills_the_window(seed):
    """From then on the window has the losses of the new level, of which a loss stands out as of any."""
    settings, low, high = SpikeSection(), around(3.0, 300, seed), around(3.6, 1000, seed + 9)
    rising = after_losses(Health(), [*low, *high], settings)
    assert [step for step, health in enumerate(rising) if health.spiking] == [*range(300, 427)]
    assert [rising[step].spikes for step in (299, 300, 426, 427, 1299)] == [0, 1, 127, 128, 128]
    assert rising[427].recent == tuple(high[:128])
    again = after_losses(rising[-1], [3.6, 3.8, 3.6, *around(4.5, 300, seed)], settings)
    assert [step for step, health in enumerate(again) if health.spiking] == [1, *range(3, 130)]
    assert again[-1].spikes == 128 + 1 + 128


def test_losses_of_a_new_stage_of_the_curriculum_have_a_window_of_their_own():
    settings = SpikeSection()
    (*_, before) = after_losses(Health(), around(3.0, 300, 0), settings)
    assert before.in_new_stage() == replace(before, recent=())
    after = after_losses(before.in_new_stage(), around(3.6, 1000, 1), settings)
    assert not any(health.spiking for health in after)
    assert after[-1].spikes == 0


def test_a_loss_at_the_edge_is_one_spike_until_it_is_half_as_far_above_the_mean():
    settings = SpikeSection(threshold=4.0, window=8)
    high = Health(recent=(2.9, 3.1) * 4).after(3.5, True, settings)  # the mean is 3.0, the deviation 0.1
    assert (high.spikes, high.spiking) == (1, True)
    assert (high.after(3.3, True, settings).spikes, high.after(3.3, True, settings).spiking) == (1, True)
    assert not high.after(3.19, True, settings).spiking
    assert high.after(math.nan, False, settings).spiking  # a skipped step


def test_counts_of_a_rewound_run_stay_those_of_the_whole_run(tmp_path):
    """What the window has is that of the checkpoint, as are the skipped steps in a row."""
    then = Health(skipped=1, in_a_row=0, spikes=2, recent=(3.0, 3.1))
    now = Health(skipped=4, in_a_row=3, spikes=5, recent=(3.1, 3.2), high=(8.0,))
    health = now.rewound_to(then)
    assert health == Health(skipped=4, in_a_row=0, spikes=5, recent=(3.0, 3.1), high=(8.0,))
    saved = TrainState(12, 192, [], then)
    assert after_rewinds(tmp_path, saved) == saved
    add_rewind(tmp_path, Rewind(12, 192, 208, 13, 8.0, health.spikes, health.skipped))
    assert after_rewinds(tmp_path, saved) == TrainState(12, 208, [], replace(then, skipped=4, spikes=5))
    add_rewind(tmp_path, Rewind(12, 192, 224, 13, 8.0, 6, 4))  # the rows after these are a spike, too
    assert after_rewinds(tmp_path, saved) == TrainState(12, 224, [], replace(then, skipped=4, spikes=6))
    old = [{"step": 12, "position": 192, "to": 224, "spike_step": 14, "loss": 8.0}]  # of an earlier version
    (tmp_path / "rewinds.json").write_text(json.dumps(old))
    assert after_rewinds(tmp_path, saved) == TrainState(12, 224, [], then)
