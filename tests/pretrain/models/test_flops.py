"""FLOPs of a model."""

from pretrain.models.flops import Sizes, flops_by_part
from tests.support.small_models import VOCABULARY, as_at_the_start


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
