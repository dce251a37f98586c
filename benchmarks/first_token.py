"""How soon does an answer begin, and how fast is it written: by an encoder-decoder or by a decoder of the same size?

    python benchmarks/first_token.py [--threads 1] [--inputs 64 512 2048] [--new 64]

After Elfeki et al., "Return of the Encoder" (2025), who find 47 % less time to the first token and 4.7 times the tokens
per second. One input at a time; weights are random, so nothing is said of what the models write. The three models have
the same width and within 3 % the same parameters between the embeddings: 14 layers of a decoder (Llama's), 6 + 6 layers
of T5 v1.1, and 8 + 4. A token of an answer costs a product with every weight of the decoder, and attention to all
tokens before it; an encoder's weights it never meets.

Ours is `generate`; CTranslate2 runs the same weights from an export, in fp32 and in int8. To the first token: an answer
of one token. A token after it: the rest of an answer of `--new`, divided by their number, by the difference of the two
medians.
"""

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from harness import Options, Side, Table, compare, main
from peers import in_transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.models import build, parse
from pretrain.models.stacks import EncoderDecoder

LIMIT = """The first token costs a pass over the input by the layers that read it: all of the decoder's, or the
encoder's. Each later token costs a product with each weight of the decoder, which at one input at a time is the time to
read these weights from memory; so the time of a token follows the decoder's share of the parameters."""

VOCABULARY, WIDTH = 32_000, 512
SIZES = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_ff": 1024, "num_heads": 8}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "biases": False, "tie_embeddings": False}
MODELS = {
    "decoder, 14 layers": {"family": "decoder_only", **SIZES, **LLAMA, "num_layers": 14},
    "6 + 6 layers": {"family": "t5", **SIZES, "d_kv": 64, "num_encoder_layers": 6, "num_decoder_layers": 6},
    "8 + 4 layers": {"family": "t5", **SIZES, "d_kv": 64, "num_encoder_layers": 8, "num_decoder_layers": 4},
}


class Served:
    """A model in this project and in CTranslate2."""

    def __init__(self, settings: dict[str, Any], folder: Path, threads: int):
        torch.manual_seed(0)
        self.model: Any = build(parse(settings)).eval()
        self.reads = isinstance(self.model, EncoderDecoder)
        in_transformers(self.model, folder / "hf")
        words = {f"w{number}": number for number in range(2, VOCABULARY)}
        names = {"pad_token": "<pad>", "bos_token": "w3", "eos_token": "</s>", "unk_token": "w2"}
        tokenizer = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, **words}, unk_token="w2"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "hf")
        ctranslate2.converters.TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"), force=True)
        kind = ctranslate2.Translator if self.reads else ctranslate2.Generator
        self.theirs = {
            precision: kind(str(folder / "ct2"), compute_type=precision, intra_threads=threads, inter_threads=1)
            for precision in ("float32", "int8")
        }

    @property
    def layers(self) -> tuple[int, int]:
        """Parameters of all layers, and of those that each new token meets."""
        counts = [sum(p.numel() for p in part.parameters()) for part in (self.model, self.model.decoder)]
        tables = sum(
            p.numel() for name, p in self.model.named_parameters() if name.startswith(("embedding", "lm_head"))
        )
        return counts[0] - tables, counts[1]

    def ours(self, ids: torch.Tensor, new: int) -> None:
        found = generate(self.model, ids, None, GenerationSettings(max_new_tokens=new))
        assert found.size(1) == new, "the answer ended early: choose another seed"

    def in_ctranslate2(self, precision: str, ids: torch.Tensor, new: int) -> None:
        tokens = [[f"w{number}" for number in row] for row in ids.tolist()]
        engine = self.theirs[precision]
        if self.reads:
            done = engine.translate_batch(tokens, beam_size=1, max_decoding_length=new, min_decoding_length=new)
            length = len(done[0].hypotheses[0])
        else:
            limits = {"max_length": new, "min_length": new, "include_prompt_in_result": False}
            length = len(engine.generate_batch(tokens, beam_size=1, **limits)[0].sequences[0])
        assert length == new


def measure(options: Options) -> Iterator[Table]:
    given = options.arguments
    for threads in options.threads:
        with tempfile.TemporaryDirectory() as folder:
            models = {
                name: Served(one, Path(folder, str(number)), threads)
                for number, (name, one) in enumerate(MODELS.items())
            }
            for engine in ("ours", "float32", "int8"):
                title = "this project, fp32" if engine == "ours" else f"CTranslate2, {engine}"
                columns = ["input", "model", "layers' parameters", "of them each token's", "to the first token"]
                columns += ["against the decoder", "a token after it", "tokens/s", "against the decoder"]
                table = Table(f"{title}, {threads} thread{'s' * (threads > 1)}, answers of {given.new} tokens", columns)
                for length in given.inputs:
                    ids = torch.randint(2, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
                    sides: dict[str, Side] = {}
                    for name, one in models.items():
                        side = one.ours if engine == "ours" else partial(one.in_ctranslate2, engine)
                        sides |= {f"{name} {new}": partial(side, ids, new) for new in (1, given.new)}
                    found = compare(sides, options, threads)
                    for name, one in models.items():
                        first, whole = (found[f"{name} {new}"] for new in (1, given.new))
                        rest = (whole.median - first.median) / (given.new - 1)
                        if name == next(iter(models)):
                            base = first.median, rest
                        table.add(
                            length,
                            name,
                            f"{one.layers[0] / 1e6:.1f} M",
                            f"{one.layers[1] / 1e6:.1f} M",
                            first,
                            f"{first.median / base[0] - 1:+.0%}",
                            f"{1e3 * rest:.2f} ms",
                            f"{1 / rest:.0f}",
                            f"{base[1] / rest:.2f} ×",
                            input=length,
                            model=name,
                            engine=engine,
                            **found.data,
                        )
                yield table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inputs", type=int, nargs="+", default=(64, 512, 2048), help="tokens of an input")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
