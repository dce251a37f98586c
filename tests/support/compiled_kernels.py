"""The attention kernels compiled ahead of time, without a GPU: the interpreter lets errors of types pass."""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch

KERNELS = ("forward", "backward_queries", "backward_keys")
# Bytes of shared memory that a program may have, by architecture: 99, 163 and 227 KB (CUDA C++ Programming Guide,
# "Compute Capabilities"). 80: A100, 86: RTX 3090, 89: RTX 4090 and L40S, 90: H100, 100: B200, 120: RTX 5090.
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
PRODUCTS = {90: "wgmma", 100: "tcgen05"}  # the tensor cores' instructions; mma.sync on the others
_FP32 = ("DIAGONALS", "NORMALISERS", "DELTA", "PARTS")
_INT32 = ("QUERY_LABELS", "KEY_LABELS", "RANGES", "SEED")
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Form(NamedTuple):
    """What a kernel computes besides products and softmax."""

    bias: bool = False
    labels: bool = False
    dropout: bool = False
    causal: bool = False
    window: bool = False
    softcap: bool = False

    def absent(self) -> list[str]:
        """The arguments that are None."""
        by_feature = {
            "bias": ["DIAGONALS", "PARTS"],
            "labels": ["QUERY_LABELS", "KEY_LABELS", "RANGES"],
            "dropout": ["SEED"],
            "window": ["before"],
            "softcap": ["softcap"],
        }
        absent = [name for feature, names in by_feature.items() if not getattr(self, feature) for name in names]
        return absent if self.causal or self.window else [*absent, "after"]


EVERYTHING = Form(bias=True, labels=True, dropout=True, causal=True)
EVERYTHING_IN_A_WINDOW = EVERYTHING._replace(causal=False, window=True, softcap=True)
PLAIN = Form(bias=True)
# of T5's encoder with full rows and with padding, of its decoder, and of T5Gemma, which has no bias
OF_FAMILIES = (
    PLAIN,
    Form(bias=True, labels=True, dropout=True),
    EVERYTHING,
    EVERYTHING_IN_A_WINDOW._replace(bias=False),
)


def compiled(kernel: str, architecture: int, dtype: torch.dtype, d_kv: int, form: Form) -> Any:
    """A kernel in one form, with the tiles that such a GPU takes."""
    import triton  # has no wheel for some machines
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pretrain.models.kernels import flash
    from pretrain.models.kernels.tiles import tile_sizes

    function = getattr(flash, kernel)
    tiles = tile_sizes(kernel, dtype, d_kv, SHARED[architecture])
    constants: dict[str, Any] = {"PRECISION": "ieee", "D": d_kv, "BLOCK_D": d_kv}
    constants |= {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns}
    constants |= dict.fromkeys(form.absent())
    constants = {name: constants[name] for name in function.arg_names if name in constants}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.isupper():
            return "*fp32" if name in _FP32 else "*i32" if name in _INT32 else f"*{_NAMES[dtype]}"
        return "fp32" if name in ("scale", "softcap", "dropout") else "i32"

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


class Usage(NamedTuple):
    """Of a thread: registers, and bytes of local memory, where what the registers don't hold is spilled to. Of a
    program: bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def usage(kernel: Any, folder: Path) -> Usage:
    """What a compiled kernel takes, as CUDA's cuobjdump says, which comes with Triton."""
    printed = _told("cuobjdump", "--dump-resource-usage", kernel, folder)
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return Usage(int(found[1]), int(found[2]), kernel.metadata.shared)


class Loop(NamedTuple):
    """What a warp runs for a tile of keys (or queries): instructions, and barriers among them."""

    instructions: int
    barriers: int


def loops(kernel: Any, folder: Path) -> list[Loop]:
    """The loops of a compiled kernel, as CUDA's nvdisasm prints it, which comes with Triton. With full rows and no
    window the first is the loop over whole tiles."""
    found: list[Loop] = []
    names: list[str] = []  # of instructions
    starts: dict[str, int] = {}
    for line in _told("nvdisasm", "--print-code", kernel, folder).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            starts[label[1]] = len(names)
        elif code := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(\w+)(.*);", line):
            names.append(code[1])
            target = re.search(r"\.L_x_\d+", code[2])
            if code[1] == "BRA" and target and starts.get(target[0], len(names)) < len(names) - 1:
                body = names[starts[target[0]] :]
                found.append(Loop(len(body), body.count("BAR")))
    return found


def _told(program: str, option: str, kernel: Any, folder: Path) -> str:
    import triton  # as above

    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [str(Path(triton.__file__).parent / "backends/nvidia/bin" / program), option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
