"""T5Gemma and T5Gemma 2: published sizes, windows, FLOPs."""

from pathlib import Path

import torch
import yaml

from pretrain.functional.attention_bias import visible
from pretrain.models import T5Gemma2Config, outline
from pretrain.models.flops import Sizes, flops_by_part
from pretrain.models.t5gemma import encoder_window
from pretrain.models.t5gemma2 import encoder_window as encoder_window_of_2
from tests.pretrain.small_models import VOCABULARY, as_at_the_start, ids, made
from tests.tables import each


@each(
    "size, layers, d, ff, heads, kv",
    [("270m-270m", 18, 640, 2048, 4, 1), ("1b-1b", 26, 1152, 6912, 4, 1), ("4b-4b", 34, 2560, 10240, 8, 4)],
)
def test_parameters_of_t5gemma_2(size, layers, d, ff, heads, kv):
    """Two equal stacks: q and o, k and v, the feed-forward layer, four norms, and norms of queries and keys."""
    values = yaml.safe_load(Path(f"configs/models/t5gemma2-{size}.yaml").read_text())["model"]
    layer = 2 * d * heads * 256 + 2 * d * kv * 256 + 3 * d * ff + 4 * d + 2 * 256
    assert outline(T5Gemma2Config(**values)).num_parameters() == 2 * (layers * layer + d) + 262_144 * d


def seen_by(window, query, causal=False):
    mask = visible(10, 10, torch.device("cpu"), causal=causal, window=window)
    return mask[0, 0, query].nonzero().flatten().tolist()


def test_windows_worked_by_hand():
    """transformers' T5Gemma sees w tokens on each side; T5Gemma 2 sees w tokens, of which ⌊w / 2⌋ are later ones."""
    assert seen_by(encoder_window(2), 5) == [3, 4, 5, 6, 7]
    assert seen_by(encoder_window(4), 4) == list(range(9))
    assert seen_by(encoder_window_of_2(4), 6) == [5, 6, 7, 8]
    assert seen_by(encoder_window_of_2(5), 6) == [4, 5, 6, 7, 8]
    assert seen_by(encoder_window_of_2(4), 0) == [0, 1, 2]


def test_cross_attention_of_t5gemma_has_no_positions():
    model = made("t5gemma")
    states, targets = model.encode(ids(2, 12)), ids(2, 7, seed=1)
    shuffled = states[:, torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(model.decode(targets, shuffled), model.decode(targets, states), rtol=0, atol=1e-5)


def test_flops_of_unequal_stacks():
    """Encoder: 3 layers of width 48, heads 4 · 16; decoder: 4 of width 32, heads 4 · 8, keys and values 2 · 8."""
    model = as_at_the_start("t5gemma, unbalanced", sliding_window=10)
    encoder = 4 * 48 * 64 + 3 * 48 * 48
    decoder = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    pairs = {"encoder": 100**2 + 2 * 100 * 21, "decoder": 2 * 50**2 + 2 * 50 * 10}
    assert flops_by_part(model, Sizes.of_example(100, 50)) == {
        "encoder": 6 * 3 * encoder * 100 + 12 * 64 * pairs["encoder"],
        "decoder": 6 * 4 * decoder * 50 + 12 * 32 * pairs["decoder"],
        "cross-attention": 4 * (6 * (2 * 32 * 32 * 50 + 2 * 48 * 16 * 100) + 12 * 32 * 100 * 50),
        "head": 6 * VOCABULARY * 32 * 50,
    }
