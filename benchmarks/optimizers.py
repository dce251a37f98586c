"""Are the optimizers as fast as the fastest public implementations?

    python benchmarks/optimizers.py [--threads 1 2]

One update of fp32 parameters in the shapes of T5-v1.1-small, with gradients drawn once. The peers are
PyTorch's fused AdamW, transformers' Adafactor and PyTorch's Muon; for AdamWScale a plain loop over the parameters as
nanoT5 has it, since no library has it. Ours get one flat tensor for each group of parameters, as ZeRO gives it to them.
Both sides keep freed memory, as our ranks do. Muon is left out on a CPU without arithmetic for bf16, in which
PyTorch's multiplies: a step would take minutes.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Options, Table, compare, main, slow
from peers import our_model
from pydantic import TypeAdapter
from torch import nn

from pretrain.config.optimizers.adafactor import AdafactorConfig
from pretrain.config.optimizers.adamw import AdamWConfig
from pretrain.config.optimizers.adamw_scale import AdamWScaleConfig
from pretrain.config.optimizers.muon import MuonConfig
from pretrain.engine import optimizers
from pretrain.engine.optimizers.flat_buffers import FlatBuffer, Fragment, Sharded

LIMIT = """An update of AdamW reads four numbers and writes three for each parameter and is bound by memory. Adafactor
reads each gradient three times and each parameter twice, in rectangles that stay in the processor's cache; Muon is
mostly matrix products."""


class PlainAdamWScale(torch.optim.Optimizer):
    """AdamW whose update of each parameter is multiplied by the parameter's RMS, one parameter after the other."""

    def __init__(self, parameters: list[nn.Parameter], rate: float):
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["mean"], state["square"] = 0, *map(torch.zeros_like, [parameter] * 2)
                state["step"] += 1
                gradient, mean, square = parameter.grad, state["mean"], state["square"]
                mean.mul_(0.9).add_(gradient, alpha=0.1)
                square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                size = group["lr"] * (1 - 0.999 ** state["step"]) ** 0.5 / (1 - 0.9 ** state["step"])
                rms = max(1e-3, float(parameter.norm(2)) / parameter.numel() ** 0.5)
                parameter.addcdiv_(mean, square.sqrt().add_(1e-6), value=-size * rms)


def matrices(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [one for one in parameters if one.dim() == 2]


def adafactor(parameters: list[nn.Parameter]) -> Any:
    from transformers import Adafactor

    return Adafactor(parameters, lr=1e-3, scale_parameter=True, relative_step=False, warmup_init=False)


PEERS: dict[str, tuple[Any, str, Callable[[list[nn.Parameter]], Any]]] = {
    "AdamW": (AdamWConfig, "torch, fused", lambda all_: torch.optim.AdamW(all_, lr=1e-3, fused=True)),
    "AdamWScale": (AdamWScaleConfig, "a plain loop", lambda all_: PlainAdamWScale(all_, 1e-3)),
    "Adafactor": (AdafactorConfig, "transformers", adafactor),
    "Muon": (MuonConfig, "torch, matrices alone", lambda all_: torch.optim.Muon(matrices(all_), lr=1e-3)),
}


def measure(options: Options) -> Iterator[Table]:
    table = Table("Optimizers", ["algorithm", "threads", "ours", "peer", "its time", "ratio"])
    for name, (config, peer, build) in PEERS.items():
        if name == "Muon" and slow("bf16"):
            continue
        for threads in options.threads:
            settings = TypeAdapter(config).validate_python({"learning_rate": 1e-3, "weight_decay": 0.0})
            mine, theirs = model(), model()
            sides = {
                "ours": flattened(optimizers.build(mine, settings)).step,
                peer: build(list(theirs.parameters())).step,
            }
            result = compare(sides, options, threads)
            ratio = f"{result.ratio(peer):.2f}"
            table.add(name, threads, result.ours, peer, result[peer], ratio, **result.data)
    yield table


def flattened(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with one flat tensor in place of each group's parameters."""
    buffers = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        buffer = nn.Parameter(torch.cat([one.detach().flatten() for one in parameters]))
        buffer.grad = torch.cat([one.grad.flatten() for one in parameters])
        ends = itertools.accumulate(one.numel() for one in parameters)
        fragments = [
            Fragment(name, tuple(one.shape), 0, one.numel(), buffer, end - one.numel())
            for name, one, end in zip(group["param_names"], parameters, ends, strict=True)
        ]
        group["params"] = [buffer]
        buffers.append(FlatBuffer(buffer, fragments))
    if isinstance(optimizer, Sharded):
        optimizer.attach(buffers)
    return optimizer


def model() -> nn.Module:
    made = our_model("t5-v1.1-small")
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.grad = torch.empty_like(parameter).normal_(std=1e-3, generator=generator)
    return made


if __name__ == "__main__":
    main(__doc__, measure, LIMIT)
