"""The attention kernels compiled ahead of time, without a GPU: the interpreter lets errors of types pass."""

from typing import Any

import torch

KERNELS = ("forward", "backward_queries", "backward_keys", "backward_diagonals")
_FP32 = ("DIAGONALS", "NORMALISERS", "DELTA", "PARTS")
_INT32 = ("QUERY_LABELS", "KEY_LABELS", "RANGES", "SEED")
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def compiled(kernel: str, architecture: int, dtype: torch.dtype, d_kv: int) -> Any:
    """A kernel with bias, labels, causality and dropout, at the fixed choice of tiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pretrain.kernels import backward, forward
    from pretrain.kernels.tuning import choices

    function = getattr(forward if kernel == "forward" else backward, kernel)
    tiles = choices(kernel, dtype, d_kv)[0]
    constants: dict[str, Any] = {"CAUSAL": True, "PRECISION": "ieee", "D": d_kv, "BLOCK_D": d_kv}
    constants |= {"BLOCK": tiles.rows, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns}
    constants = {name: constants[name] for name in function.arg_names if name in constants}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.isupper():
            return "*fp32" if name in _FP32 else "*i32" if name in _INT32 else f"*{_NAMES[dtype]}"
        return "fp32" if name in ("scale", "dropout") else "i32"

    names = list(enumerate(function.arg_names))
    # the diagonals start anywhere; other pointers, and strides, are multiples of 16
    pointers = [n for n, name in names if name.isupper() and name not in ("DIAGONALS", *constants)]
    strides = [n for n, name in names if len(name) == 2 and name[1] in "bhl"]
    source = ASTSource(
        fn=function,
        signature={name: kind(name) for _, name in names},
        constexprs=constants,
        attrs={(n,): [["tt.divisibility", 16]] for n in (*pointers, *strides)},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
