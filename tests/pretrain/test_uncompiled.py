"""PyTorch's compiler stays out of runs that compile nothing, and is there for whoever needs it after all."""

import subprocess
import sys

import pytest

from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_runs import micro_batches, own_layout, run_config

STEPS = 2
ALONE = f"""
import sys
from tests.pretrain.test_uncompiled import trained
from pretrain.zero.ranks import process_group
with process_group(1, 600.0):
    print(trained({STEPS}))
    print(*(name for name in ("torch._inductor", "sympy", "networkx", "mlflow", "pandas") if name in sys.modules))
    import torch
    import torch._dynamo.config
    print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
    print(trained({STEPS}))
"""


def trained(steps: int) -> list[float]:
    """The losses of some steps with torch's AdamW, which asks torch._dynamo not to compile its methods."""
    from pretrain.zero.construction import construct
    from pretrain.zero.engine import Engine

    config = run_config(2)
    layout = own_layout()
    engine = Engine(construct(config, config.model), config)
    losses = [engine.step(step, 4 * step, micro_batches(layout, step)).loss for step in range(steps)]
    engine.close()
    return losses


@pytest.mark.slow
def test_a_rank_that_compiles_nothing_trains_the_same_without_the_compiler():
    """In `on_ranks` the compiler is loaded before; in a process of its own only when someone asks for it."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    without, imported, compiled, again = done.stdout.splitlines()[-4:]
    assert imported == ""
    assert compiled == "[2.0, 2.0]"
    (with_it,) = on_ranks(1, trained, STEPS)
    assert without == again == str(with_it)
