"""Is generation as fast as transformers'?

    python benchmarks/generation.py [--threads 1 2] [--precision bf16 fp32] [--models gpt2-small …]

The same prompts go through `generate` of both, with the same weights, in the same process, in turns. Prompts have a
quarter of 128 tokens to all of them, padded to one batch; random weights hardly ever end a text before 32 tokens.
`bart-large-like` has the widths and the vocabulary of BART-large, and two layers in each stack.

The floor is the time of all products with weights that our tokens need, as a share of our time: those of the encoder
without padding, and those of every step. At most: the ratio if our time were the floor.

The program ends with an error unless the tokens are the same. Weights are random, twice as large as at the start of
training. In fp32 all texts must be equal. In bf16, the first tokens that differ in a greedy text must be tied: their
logits, in fp32 with the same weights, are no further apart than twice the largest error of a logit of transformers in
bf16; the beams of bf16 are only counted. On a CPU without products in bf16, bf16 is measured at the quickstart's size
alone unless --precision is given: emulated products take long.
"""

import argparse
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import PRECISIONS, Options, Table, compare, main, slow
from peers import in_transformers, our_model
from torch import Tensor

from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.models import build, parse
from pretrain.models.model import Model
from pretrain.models.stacks import EncoderDecoder

LIMIT = """The products with weights, which both sides need: the column "at most" has the ratio that would be left if
ours took no time for anything else. In fp32 with 8 rows and more they are bound by arithmetic, and take most of the
time of T5-small and of larger models. At the quickstart's size a fifth to a third; the rest is attention, some
microseconds for each head, the calls of small operations and, with beams, copies of the caches. bf16 gains most on a
CPU without products in bf16, where transformers' are emulated and ours are in fp32."""

SMALL = {"family": "t5", "vocab_size": 8192, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4}
LAYERS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
MODELS = ("t5-v1.1-small", "bart-large-like", "quickstart", "bart-base", "gpt2-small")
BY_DEFAULT = MODELS[:3]
BATCH, LENGTH, NEW = 8, 128, 32  # prompts, tokens of the longest, and tokens that are generated for each
BEAMS = (1, 4)  # 1: greedy


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    if name == "quickstart":
        model = build(parse({**SMALL, **LAYERS}))
    else:
        model = our_model("bart-large", **LAYERS) if name == "bart-large-like" else our_model(name)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(2.0)
    return model.eval()


def prompts(model: Model) -> tuple[Tensor, Tensor]:
    """Ids and their mask, padded on the side that the model expects."""
    vocabulary = model.config.vocab_size or 0
    ids = torch.randint(10, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(LENGTH, LENGTH // 4, BATCH).long()[:, None]
    mask = torch.arange(LENGTH) < lengths
    mask = mask if isinstance(model, EncoderDecoder) else mask.flip(1)
    return ids.masked_fill(~mask, model.config.pad_id), mask.long()


class Pair:
    """Both sides of a model in one precision."""

    def __init__(self, name: str, precision: str):
        model, dtype = model_of(name), PRECISIONS[precision]
        with tempfile.TemporaryDirectory() as folder:
            self.peer = in_transformers(model, Path(folder) / "model").to(dtype)
        self.model = model.to(dtype)
        self.reads = isinstance(model, EncoderDecoder)
        self.ids, self.mask = prompts(model)

    def ours(self, beams: int) -> Tensor:
        settings = GenerationSettings(max_new_tokens=NEW, num_beams=beams)
        return generate(self.model, self.ids, self.mask, settings)

    def theirs(self, beams: int) -> Tensor:
        config = self.model.config
        options = {"max_new_tokens": NEW, "num_beams": beams, "do_sample": False, "use_cache": True}
        ids = {"pad_token_id": config.pad_id, "eos_token_id": config.eos_id, "forced_eos_token_id": None}
        start = {"decoder_start_token_id": config.decoder_start_id} if self.reads else {}
        found = self.peer.generate(self.ids, attention_mask=self.mask, **options, **ids, **start)
        return found[:, 1 if self.reads else self.ids.size(1) :]

    def check(self, beams: int) -> str:
        """How many rows get the same tokens up to EOS. Raises RuntimeError where a difference is no tie."""
        ours, theirs = self.ours(beams), self.theirs(beams)
        other = self._unequal(ours, theirs)
        found = f"{len(ours) - len(other)} of {len(ours)}"
        if not other:
            return found
        if self.peer.dtype == torch.float32:
            wrong = other
        elif beams == 1:
            exact = copy.deepcopy(self.peer).float()
            wrong = [row for row in other if not self._tied(row, ours[row], theirs[row], exact)]
            found = f"{found}; ties"
        else:
            wrong = []
        if wrong:
            raise RuntimeError(f"{beams} beams, {self.peer.dtype}: other tokens than transformers' in rows {wrong}")
        return found

    def _unequal(self, ours: Tensor, theirs: Tensor) -> list[int]:
        end, rows = self.model.config.eos_id, zip(ours.tolist(), theirs.tolist(), strict=True)
        return [row for row, (one, other) in enumerate(rows) if until_eos(one, end) != until_eos(other, end)]

    @torch.no_grad()
    def _tied(self, row: int, ours: Tensor, theirs: Tensor, exact: Any) -> bool:
        """Whether rounding in bf16 may choose either token at the first step where the two texts differ."""
        length = min(len(ours), len(theirs))
        step = int((ours[:length] != theirs[:length]).nonzero()[0])
        ids, mask = self.ids[row, None], self.mask[row, None]
        if self.reads:
            start = ids.new_full((1, 1), self.model.config.decoder_start_id)
            prefix = {"decoder_input_ids": torch.cat([start, ours[None, :step]], dim=1)}
        else:
            prefix = {}
            ids = torch.cat([ids[mask > 0][None], ours[None, :step]], dim=1)
            mask = torch.ones_like(ids)
        of_exact, rounded = (
            peer(input_ids=ids, attention_mask=mask, **prefix).logits[0, -1].float() for peer in (exact, self.peer)
        )
        gap = (of_exact[ours[step]] - of_exact[theirs[step]]).abs()
        return bool(gap <= 2 * (rounded - of_exact).abs().max())

    @torch.no_grad()
    def products(self, beams: int) -> None:
        """All products with weights for the tokens of `ours`."""
        model: Any = self.model
        rows, like = len(self.ids) * beams, model.embedding.weight
        if self.reads:
            for layer in model.encoder.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer(like.new_zeros(int(self.mask.sum()), layer.in_features))
        decoder = {name: one for name, one in model.decoder.named_modules() if isinstance(one, torch.nn.Linear)}
        layers = [one for name, one in decoder.items() if not name.endswith(("cross_attention.k", "cross_attention.v"))]
        inputs = [like.new_zeros(rows, 1, layer.in_features) for layer in layers]
        for _ in range(NEW):
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)
            model.lm_head(like.new_zeros(rows, like.size(1)))


def until_eos(row: list[int], eos: int) -> list[int]:
    return row[: row.index(eos) + 1] if eos in row else row


def measure(options: Options) -> Iterator[Table]:
    given = options.arguments
    for name in given.models:
        columns = ["decoding", "dtype", "threads", "ours", "transformers", "ratio", "floor", "at most", "equal rows"]
        table = Table(f"{name}, {BATCH} × {LENGTH} + {NEW}", columns)
        for precision in options.precisions:
            if slow(precision) and name != "quickstart" and not given.precision:
                continue
            pair = Pair(name, precision)
            for beams in BEAMS:
                equal = pair.check(beams)
                for threads in options.threads:
                    sides = {
                        "ours": lambda pair=pair, beams=beams: pair.ours(beams),
                        "transformers": lambda pair=pair, beams=beams: pair.theirs(beams),
                        "floor": lambda pair=pair, beams=beams: pair.products(beams),
                    }
                    result = compare(sides, options, threads, rounds=given.rounds)
                    table.add(
                        "greedy" if beams == 1 else f"{beams} beams",
                        precision,
                        threads,
                        result.ours,
                        result["transformers"],
                        f"{result.ratio('transformers'):.2f}",
                        f"{result.ratio('floor'):.0%}",
                        f"{result.ratio('transformers') / result.ratio('floor'):.1f}",
                        equal,
                        **result.data,
                        beams=beams,
                        precision=precision,
                        threads=threads,
                    )
        yield table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=BY_DEFAULT, help="by default the first three")
    parser.add_argument("--rounds", type=int, default=3, help="of each comparison, at most")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
