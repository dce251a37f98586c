"""FLOPs of a model, by formulas and as torch counts them."""

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loading.prefetch import example_sizes
from pretrain.models.flops import Sizes, count_flops, flops_by_part
from pretrain.models.stacks import EncoderDecoder
from tests.support.slow import slow
from tests.support.small_models import (
    MODELS,
    ONE_OF_EACH_FAMILY,
    VOCABULARY,
    as_at_the_start,
    examples_of,
    packed,
    padded_rows,
)
from tests.support.tables import each


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


def counted(model, batch):
    """Floating-point operations of matrix products, forward and backward, as torch dispatches them."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sum(losses.sum() for losses in model(**batch).values()).backward()
    return counter.get_total_flops()


LENGTHS = [(20, 12), (9, 5), (14, 7)]
# the pairs of double_decoder: examples/double_decoder
NAMES = ["t5, in every layer", *(name for name in ONE_OF_EACH_FAMILY if name != "double_decoder")]
FIRST = ("t5gemma2", "autoregressive, plain", "t5, in every layer")  # of each way to count


@each("name", [*FIRST, *slow(*(name for name in NAMES if name not in FIRST))])
def test_flops_are_those_that_torch_counts(name):
    """Rows without padding, and padded and packed ones, for which torch counts each example by itself."""
    model = as_at_the_start(name, **({"sliding_window": 64} if "sliding_window" in MODELS[name] else {}))  # sees all
    alone = [counted(model, padded_rows(model, one)) for one in LENGTHS]
    assert count_flops(model, Sizes(*example_sizes(padded_rows(model, LENGTHS[0])).tolist())) == alone[0]
    padded = padded_rows(model, *LENGTHS)
    assert count_flops(model, Sizes(*example_sizes(padded).tolist())) == sum(alone) < counted(model, padded)
    if isinstance(model, EncoderDecoder):
        together = packed(examples_of(model, [LENGTHS]))
        assert count_flops(model, Sizes(*example_sizes(together).tolist())) == sum(alone)
