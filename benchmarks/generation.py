"""Is generation faster than transformers'?

    python benchmarks/generation.py [--device cuda] [--threads 1 2] [--precision bf16 fp32] [--models gpt2-small …]

The same prompts go through `generate` of both, with the same weights, in the same process, in turns. Prompts have a
quarter of `--length` to all of it, padded to one batch; random weights hardly ever end a text before `--new` tokens.
Weights are laid out for decoding before, once for all calls; the table says what that takes. The floor is the time of
all products of a step with the weights, for every step, as a share of our time; it lacks the encoder, attention, norms
and the choice of tokens.

Weights are random, twice as large as at the start of training. In fp32 the texts must be equal; in bf16 rounding
chooses between tokens of almost the same probability, on both sides.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from agreement import until_end
from harness import PRECISIONS, Options, Table, clock, compare, main
from peers import in_transformers, our_model
from torch import Tensor

from pretrain.generation.decoding import generate
from pretrain.generation.incremental import Weights
from pretrain.generation.settings import GenerationSettings
from pretrain.models import build, parse
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.model import Model

LIMIT = """In bf16 reading the weights, once a token; in fp32 with several rows the arithmetic of the same products,
which both sides share, and the encoder. At the quickstart's size the calls of operations, a few microseconds each."""

QUICKSTART = {"family": "t5", "vocab_size": 8192, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4}
STACKS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
MODELS = ("t5-v1.1-small", "bart-base", "gpt2-small", "quickstart")


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    model = build(parse({**QUICKSTART, **STACKS})) if name == "quickstart" else our_model(name)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(2.0)
    return model.eval()


def prompts(model: Model, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and their mask, padded on the side that the model expects."""
    vocabulary = model.config.vocab_size or 0
    ids = torch.randint(10, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(length, length // 4, batch).long()[:, None]
    mask = torch.arange(length) < lengths
    mask = mask if isinstance(model, EncoderDecoder) else mask.flip(1)
    return ids.masked_fill(~mask, model.config.pad_id), mask.long()


class Pair:
    """Both sides of a model in one precision. `layout_seconds`: how long its weights took to be laid out."""

    def __init__(self, name: str, options: Options, precision: str):
        model = model_of(name)
        dtype, given = PRECISIONS[precision], options.arguments
        with tempfile.TemporaryDirectory() as folder:
            self.peer = in_transformers(model, Path(folder) / "model").to(options.device, dtype)
        self.model, self.new = model.to(options.device, dtype), given.new
        self.ids, self.mask = (x.to(options.device) for x in prompts(model, given.batch, given.length))
        torch.set_num_threads(1)
        started = clock(options.device, 1)
        weights = Weights.of(model)
        self.layout_seconds = clock(options.device, 1) - started
        assert weights is not None
        self.weights = weights

    def ours(self, beams: int) -> Tensor:
        settings = GenerationSettings(max_new_tokens=self.new, num_beams=beams)
        return generate(self.model, self.ids, self.mask, settings, weights=self.weights)

    def theirs(self, beams: int) -> Tensor:
        config = self.model.config
        options = {"max_new_tokens": self.new, "num_beams": beams, "do_sample": False, "use_cache": True}
        ids = {"pad_token_id": config.pad_id, "eos_token_id": config.eos_id, "forced_eos_token_id": None}
        reads = isinstance(self.model, EncoderDecoder)
        start = {"decoder_start_token_id": config.decoder_start_id} if reads else {}
        found = self.peer.generate(self.ids, attention_mask=self.mask, **options, **ids, **start)
        return found[:, 1 if reads else self.ids.size(1) :]

    def equal_rows(self, beams: int) -> int:
        """The number of rows that get the same tokens up to the end mark."""
        end, rows = self.model.config.eos_id, zip(self.ours(beams).tolist(), self.theirs(beams).tolist(), strict=True)
        return sum(until_end(ours, end) == until_end(theirs, end) for ours, theirs in rows)

    @torch.no_grad()
    def products(self, beams: int) -> None:
        """All products of our decoder with its weights, for every step."""
        rows, weights = len(self.ids) * beams, self.weights
        like = weights.model.embedding.weight
        x = like.new_zeros(rows, like.size(1))
        inner = like.new_zeros(rows, weights.layers[0].attention.o.in_features)
        for _ in range(self.new):
            for layer in weights.layers:
                layer.qkv(x)
                layer.out(inner)
                if layer.across:
                    layer.across.q(x)
                    layer.across.out(inner)
                layer.feed_forward(x)
            weights.logits(x)


def measure(options: Options) -> Iterator[Table]:
    given = options.arguments
    for name in given.models:
        columns = ["decoding", "dtype", "threads", "ours", "transformers", "ratio", "floor", "equal rows", "layout"]
        table = Table(f"{name}, {given.batch} × {given.length} + {given.new}", columns)
        for precision in options.precisions:
            pair = Pair(name, options, precision)
            for beams in given.beams:
                equal = pair.equal_rows(beams)
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
                        f"{equal} of {given.batch}",
                        f"{pair.layout_seconds * 1e3:.0f} ms",
                        **result.data,
                        beams=beams,
                        precision=precision,
                        threads=threads,
                    )
        yield table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="by default all")
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together")
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens generated for each prompt")
    parser.add_argument("--beams", type=int, nargs="+", default=(1, 4), help="1: greedy")
    parser.add_argument("--rounds", type=int, default=7, help="of each comparison, at most")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
