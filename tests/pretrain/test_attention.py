"""Attention is right for every length and mask, and never meets a kernel that isn't."""

import torch

from pretrain.functional.attention import sdpa_kernels
from tests.pretrain.attention_cases import Case, by_pytorch, errors
from tests.tables import each

LENGTHS = (63, 64, 114, 128, 192, 320, 512)
FORMS = [
    {"bias": False},
    {"bias": False, "causal": True},
    {},
    *({"bias": bias, "masking": masking} for bias in (False, True) for masking in ("padding", "packed", "nothing")),
]

# Unit roundoff is 6e-8 in fp32 and 4e-3 in bf16. Sums of some hundred roundings of random sign stay below these.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 3e-2}


@each("dtype", BOUNDS)
def test_outputs_and_gradients_are_those_of_fp64(dtype):
    lengths = LENGTHS if dtype == torch.float32 else (64, 114, 192)
    for case in (Case(length, length, **form, dtype=dtype) for length in lengths for form in FORMS):
        assert max(errors(case, "cpu", by_pytorch).values()) < BOUNDS[dtype], case


def test_cudnn_never_gets_a_mask():
    """PyTorch's switches exist without a GPU too."""
    flags = torch.backends.cuda
    gpu, before = torch.device("cuda"), flags.cudnn_sdp_enabled()
    with sdpa_kernels(gpu, masked=True):
        others = (flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled())
        assert (flags.cudnn_sdp_enabled(), *others) == (False, True, True, True)
    assert flags.cudnn_sdp_enabled() == before
    with sdpa_kernels(gpu, masked=False):
        assert flags.cudnn_sdp_enabled() == before
