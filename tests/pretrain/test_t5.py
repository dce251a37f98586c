"""T5, compared with its paper's numbers."""

import itertools
import subprocess
import sys
from pathlib import Path

import torch

from pretrain.functional.attention_bias import toeplitz
from pretrain.models.t5 import RelativePositionBias, relative_position_bucket
from tests.pretrain.small_models import as_at_the_start, ids
from tests.tables import each

# First distance of each bucket, 32 buckets up to distance 128.
BIDIRECTIONAL = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
UNIDIRECTIONAL = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_buckets():
    def buckets(firsts):
        return [sum(first <= distance for first in firsts) - 1 for distance in range(300)]

    keys_before, keys_after = -torch.arange(300), torch.arange(1, 300)
    both, causal = buckets(BIDIRECTIONAL), buckets(UNIDIRECTIONAL)
    assert relative_position_bucket(keys_before, bidirectional=True).tolist() == both
    assert relative_position_bucket(keys_after, bidirectional=True).tolist() == [16 + bucket for bucket in both[1:]]
    assert relative_position_bucket(keys_before, bidirectional=False).tolist() == causal
    assert relative_position_bucket(keys_after, bidirectional=False).unique().tolist() == [0]


@each("sizes, bidirectional", itertools.product([(5, 5), (1, 9), (3, 200), (150, 150)], [True, False]))
def test_relative_bias_of_a_query_and_a_key_is_that_of_their_distance(sizes, bidirectional):
    queries, keys = sizes
    bias = RelativePositionBias(32, 128, 4, bidirectional, std=1.0)
    positions = torch.arange(keys)
    distances = positions[None, :] - positions[keys - queries :, None]
    expected = bias.weight[relative_position_bucket(distances, bidirectional)].permute(2, 0, 1)[None]
    found = toeplitz(bias(queries, keys), keys)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.is_contiguous()  # else PyTorch's attention copies it in each layer


def test_which_parameters_positions_are():
    default = {key for key, _ in as_at_the_start("t5").named_parameters()}
    tables, learned = (
        {f"{stack}.{kind}.weight" for stack in ("encoder", "decoder")}
        for kind in ("relative_attention_bias", "learned_positions")
    )
    assert tables <= default
    for name in ("t5, rotary", "t5, alibi", "t5, sinusoidal", "t5, learned"):
        own = learned if name == "t5, learned" else set()
        assert {key for key, _ in as_at_the_start(name).named_parameters()} == default - tables | own


def test_configs_do_not_import_torch():
    code = "import sys, pretrain.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_five_files_are_read_from_the_ids_to_the_loss():
    """Those of models that a forward pass enters: below them are functions of tensors."""
    model, entered = as_at_the_start("t5", dropout_rate=0.1).train(), set()
    sys.setprofile(lambda frame, *_: entered.add(Path(frame.f_code.co_filename)))
    try:
        model(ids(2, 9), ids(2, 7), encoder_attention_mask=torch.ones(2, 9))
    finally:
        sys.setprofile(None)
    files = [file for file in entered if file.parent.name == "models"]
    assert {file.stem for file in files} == {"t5", "stacks", "layers", "attention", "model"}
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1200
