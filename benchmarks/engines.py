"""Do other engines decode an export as transformers does?

    python benchmarks/engines.py [--write docs/results/models.md] [--llama-cpp DIRECTORY]

Exports models of random weights for every engine, decodes texts greedily in fp32 and compares ids and log-probabilities
with those of `pretrain generate`. DIRECTORY is llama.cpp's source tree, whose converter is run; the bindings are those
of `pip install llama-cpp-python`, which compiles llama.cpp. Without it, that engine is left out.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from agreement import config_of, randomised
from ctranslate2 import Translator
from ctranslate2.converters import TransformersConverter
from families import show
from harness import ROOT, Table
from sentencepiece import SentencePieceTrainer

from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.sentencepiece import SentencePiece
from pretrain.checkpoint.trained import TrainedModel
from pretrain.generation.decoding import generate
from pretrain.generation.settings import GenerationSettings
from pretrain.generation.texts import input_ids
from pretrain.huggingface import export
from pretrain.models import FAMILIES, build
from pretrain.models.encoder_decoder import EncoderDecoder

MODELS = {"T5 v1.0": [], "T5 v1.1": [], "BART": ["<s>", "<mask>"]}  # and the special tokens of each
WIDTH, PIECES, SENTINELS = 128, 1000, 100
STD = 0.1  # of the weights
TOKENS = 12
TEXTS = (
    "The city has <extra_id_0> people and lies on the river.",
    "Thank you for <extra_id_0> me to your party <extra_id_1> week.",
    "In 1862 he was born in the north of the country.",
    "a",
)


@dataclass(frozen=True)
class Decoded:
    """What an engine makes of one text: the ids it reads, those it writes, and their log-probabilities."""

    inputs: list[int]
    tokens: list[int]
    logs: list[float]


Engine = Callable[[Path, Path], list[Decoded]]


def here(trained: TrainedModel) -> list[Decoded]:
    """Each text by itself, in this project."""
    model, eos = trained.model, trained.tokenizer.vocabulary.eos
    assert isinstance(model, EncoderDecoder)
    found = []
    for text in TEXTS:
        inputs = input_ids(trained.tokenizer, text, FAMILIES[model.config.family])
        row = torch.tensor([inputs])
        tokens = until(generate(model, row, None, GenerationSettings(max_new_tokens=TOKENS))[0].tolist(), eos)
        start = torch.tensor([[model.config.decoder_start_id, *tokens[:-1]]])
        with torch.no_grad():
            logs = model.decode(start, model.encode(row))[0, :, : trained.tokenizer.size].log_softmax(dim=-1)
        found.append(Decoded(inputs, tokens, logs[range(len(tokens)), tokens].tolist()))
    return found


def in_transformers(directory: Path, _: Path) -> list[Decoded]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    found = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": TOKENS}
        tokens = until(model.generate(ids, **settings)[0, 1:].tolist(), tokenizer.eos_token_id)
        with torch.no_grad():
            logs = model(input_ids=ids, labels=torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
        found.append(Decoded(ids[0].tolist(), tokens, logs[range(len(tokens)), tokens].tolist()))
    return found


def in_ctranslate2(directory: Path, folder: Path) -> list[Decoded]:
    """Its decoding leaves EOS out, and its scores include it."""
    TransformersConverter(str(directory)).convert(str(folder / "converted"), quantization="float32", force=True)
    translator = Translator(str(folder / "converted"), device="cpu", inter_threads=1, intra_threads=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    inputs = [tokenizer(text).input_ids for text in TEXTS]
    source = [tokenizer.convert_ids_to_tokens(ids) for ids in inputs]
    results = translator.translate_batch(source, beam_size=1, max_decoding_length=TOKENS)
    greedy = [result.hypotheses[0] for result in results]
    scores = translator.score_batch(source, greedy)
    found = []
    for ids, tokens, one in zip(inputs, greedy, scores, strict=True):
        whole = [*tokenizer.convert_tokens_to_ids(tokens), tokenizer.eos_token_id][:TOKENS]
        found.append(Decoded(ids, whole, one.log_probs[: len(whole)]))
    return found


def in_llama_cpp(tree: Path) -> Engine:
    llama: Any = import_module("llama_cpp")

    def decode(directory: Path, folder: Path) -> list[Decoded]:
        converter = [sys.executable, str(tree / "convert_hf_to_gguf.py"), str(directory), "--outtype", "f32"]
        out = folder / "model.gguf"
        done = subprocess.run([*converter, "--outfile", str(out)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{converter}\n{done.stderr[-3000:]}")
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(os.fsencode(out), llama.llama_model_default_params())
        vocabulary = llama.llama_model_get_vocab(model)
        count, eos = llama.llama_vocab_n_tokens(vocabulary), llama.llama_vocab_eos(vocabulary)
        found = []
        for text in TEXTS:
            settings = llama.llama_context_default_params()
            settings.n_ctx, settings.n_threads, settings.n_threads_batch = 512, 1, 1
            settings.type_k = settings.type_v = llama.GGML_TYPE_F32
            settings.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
            context = llama.llama_init_from_model(model, settings)
            room, spelled = (llama.llama_token * 512)(), text.encode()
            length = llama.llama_tokenize(vocabulary, spelled, len(spelled), room, 512, True, True)
            inputs = list(room[:length])
            assert llama.llama_encode(context, llama.llama_batch_get_one(room, length)) == 0
            tokens: list[int] = []
            logs: list[float] = []
            last = llama.llama_model_decoder_start_token(model)
            while len(tokens) < TOKENS and last != eos:
                one = (llama.llama_token * 1)(last)
                assert llama.llama_decode(context, llama.llama_batch_get_one(one, 1)) == 0
                pointer = ctypes.cast(llama.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float * count))
                scores = torch.tensor(list(pointer.contents)).log_softmax(dim=0)
                last = int(scores.argmax())
                tokens.append(last)
                logs.append(float(scores[last]))
            found.append(Decoded(inputs, tokens, logs))
            llama.llama_free(context)
        llama.llama_model_free(model)
        return found

    return decode


def until(tokens: list[int], eos: int) -> list[int]:
    """The tokens up to the first EOS, which is the last of them."""
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def compared(ours: list[Decoded], theirs: list[Decoded]) -> list[str]:
    """Texts with the same ids read, with the same ids written, and the largest difference of log-probabilities."""
    pairs = list(zip(ours, theirs, strict=True))
    alike = [(one, other) for one, other in pairs if one.tokens == other.tokens]
    differences = [abs(a - b) for one, other in alike for a, b in zip(one.logs, other.logs, strict=True)]
    of = f"of {len(pairs)}"
    return [
        f"{sum(one.inputs == other.inputs for one, other in pairs)} {of}",
        f"{len(alike)} {of}",
        f"{max(differences):.0e}" if differences else "—",
    ]


def model_of(kind: str, spiece: Path) -> TrainedModel:
    tokenizer = Tokenizer(SentencePiece.read(spiece), MODELS[kind], SENTINELS)
    config = config_of(kind, WIDTH, tokenizer.size, 96)
    return TrainedModel(randomised(build(config), STD).eval(), tokenizer)


def tables(folder: Path, engines: dict[str, Engine]) -> Iterator[Table]:
    marks: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    text = str(ROOT / "LICENSE")
    SentencePieceTrainer.train(
        input=text,
        model_prefix=str(folder / "spiece"),
        vocab_size=PIECES,
        hard_vocab_limit=False,
        minloglevel=2,
        **marks,
    )
    every = Table(
        "Exports in other engines: greedy, fp32, random weights",
        ["model", "export --for", "engine", "same ids read", "same ids written", "log-probabilities differ by"],
    )
    shown: dict[str, Decoded] = {}
    for kind in MODELS:
        trained = model_of(kind, folder / "spiece.model")
        ours = here(trained)
        for target in engines:
            if target == "llama.cpp" and kind == "BART":
                continue
            out = folder / f"{kind}-for-{target}".replace(" ", "-")
            export(trained.model.state_dict(), trained.model.config, trained.tokenizer, out, engine=target)
            for engine, decode in engines.items():
                if "llama.cpp" in (engine, target) and kind == "BART":
                    continue
                theirs = decode(out, folder)
                every.add(kind, target, engine, *compared(ours, theirs))
                if kind == "T5 v1.1" and engine == target:
                    shown |= {"here": ours[1], engine: theirs[1]}
    yield every
    names = list(shown)
    side = Table(
        f"One model in {len(names) - 1} engines: T5 v1.1, each from the export for it, “{TEXTS[1]}”",
        ["token", *(f"{name}: id, log-probability" for name in names)],
    )
    for place in range(max(len(one.tokens) for one in shown.values())):
        cells = [
            f"{one.tokens[place]}, {one.logs[place]:.6f}" if place < len(one.tokens) else "—" for one in shown.values()
        ]
        side.add(str(place + 1), *cells)
    yield side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page with the markers of the tables")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIRECTORY", help="llama.cpp's source tree")
    arguments = parser.parse_args()
    engines: dict[str, Engine] = {"transformers": in_transformers, "ctranslate2": in_ctranslate2}
    if arguments.llama_cpp:
        engines["llama.cpp"] = in_llama_cpp(arguments.llama_cpp)
    with tempfile.TemporaryDirectory() as name:
        show(tables(Path(name), engines), arguments.write)


if __name__ == "__main__":
    main()
