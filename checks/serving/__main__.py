"""What do other programs make of an export? Writes docs/results/serving/engines.csv.

    python -m checks.serving FOLDER [--programs NAME …]

A small model of each family, with weights for which greedy texts differ, is exported to FOLDER. Each program reads the
exports in an environment of its own in FOLDER, which `pip` fills; PyTorch and transformers 5 are those of this
environment. A cell says for how many of 40 prompts the program writes our greedy text, token for token, or why it
can't. Models and environments of an earlier call are used again. The whole takes an hour: llama.cpp is compiled.
"""

import argparse
import csv
import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from checks.results.data import ROOT
from checks.serving import engines
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.bpe import BPEConfig
from data_pipeline.corpus.tokenizer.byt5 import Bytes
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from data_pipeline.corpus.tokenizer.symbols import SymbolsConfig
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.export import export, hf_model_of
from pretrain.export.sentence_transformers_files import embeds
from pretrain.models import FAMILIES, build, parse
from tests.pretrain.export.test_export import ROTARY_DECODERS
from tests.support import small_families
from tests.support.exported import randomise

FAMILY = small_families.FAMILIES
STACKS = {**FAMILY["t5"], "dropout_rate": 0.0}
WIDE = {"d_model": 64}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "T5 v1.0": ({**STACKS, "feed_forward": "relu", "tie_embeddings": True}, "sentencepiece"),
    "T5 v1.1": (STACKS, "sentencepiece"),
    "T5 v1.1, bytes (ByT5)": (STACKS, "bytes"),
    "T5 v1.1, symbols": (STACKS, "symbols"),
    "umT5": ({**STACKS, "relative_attention_in_every_layer": True, "scale_outputs": True}, "sentencepiece"),
    "BART": (FAMILY["bart"], "bpe"),
    "T5Gemma": (FAMILY["t5gemma"], "sentencepiece"),
    "T5Gemma 2": (FAMILY["t5gemma2"], "sentencepiece"),
    "decoder-only, GPT-2": (FAMILY["decoder_only"], "bpe"),
    **{f"decoder-only, {name}": ({**ROTARY_DECODERS[name], **WIDE}, "bpe") for name in ("Llama", "Qwen3", "Gemma 3")},
    "autoregressive": (FAMILY["autoregressive"], "sentencepiece"),
    "modern": ({"family": "modern", "encoder": small_families.STACK, "decoder": small_families.STACK}, "sentencepiece"),
    "encoder-only, BERT": (FAMILY["encoder_only"], "bpe"),
}
# What pip installs. optimum brings transformers 4; the others use the packages of this environment where they can.
PACKAGES: dict[str, list[str]] = {
    "transformers": [],
    "CTranslate2": ["ctranslate2"],
    "ONNX Runtime": ["onnxruntime", "onnx", "onnxscript"],
    "optimum": ["optimum-onnx", "onnxruntime"],
    "llama.cpp": ["llama-cpp-python", "gguf"],
    "sentence-transformers": ["sentence-transformers"],
    "peft": ["peft"],
}
SOURCES = "llama-cpp-python"  # whose source has llama.cpp's converter
PROMPTS = 40
OURS = "ours.json"
# What a cell has in place of an error with these words.
REASONS = {
    "spiece.model": "needs `spiece.model`",
    "is not supported": "not in its converter",
    "contains custom code": "not in its converter",
    "custom or unsupported architecture": "not in its exporter",
    "does not recognize this architecture": "needs transformers 5",
    "cannot import name 'PreTrainedConfig'": "needs transformers 5",
    "BPE pre-tokenizer was not recognized": "knows published BPE only",
    "'n_ctx'": "needs `n_ctx` in config.json",
    "no modules.json": "no encoder that it loads",
}
FILE = ROOT / "docs/results/serving/engines.csv"


def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """One of each kind, trained on the licence's text."""
    text = ROOT / "LICENSE"
    sample = [line.encode() for line in text.read_text(encoding="utf-8").splitlines()]
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spiece"), vocab_size=400, **special, num_threads=1, minloglevel=2
    )
    return {
        "sentencepiece": Tokenizer(SentencePiece.read(folder / "spiece.model"), ["<s>"], 20),
        "bytes": Tokenizer(Bytes(), sentinels=20),
        "symbols": Tokenizer(SymbolsConfig(vocab_size=100).train(sample), sentinels=20),
        "bpe": Tokenizer(BPEConfig(vocab_size=400).train(sample), ["<s>", "<mask>"]),
    }


def prompts() -> list[str]:
    """Lines of the licence, without the space around them."""
    lines = [line.strip() for line in (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if len(line.split()) > 6][:PROMPTS]


def make(folder: Path) -> dict[str, dict[str, Any]]:
    """Exports all models to `folder`; returns what is ours, as `engines` writes what is theirs."""
    kinds, given, ours = tokenizers(folder), prompts(), {}
    names = {model: f"{number:02}" for number, model in enumerate(MODELS)}
    (folder / "models.json").write_text(json.dumps(names))
    (folder / "prompts.json").write_text(json.dumps(given))
    for name, (settings, kind) in MODELS.items():
        tokenizer = kinds[kind]
        fields = FAMILIES[settings["family"]].config.model_fields
        roles = {f"{role}_id": getattr(tokenizer.vocabulary, role) for role in ("pad", "eos", "bos")}
        roles = {name: id_ for name, id_ in roles.items() if name in fields}
        std = 0.05 if settings["family"].startswith("t5gemma") else 0.3  # for texts that differ
        model: Any = randomise(build(parse({**settings, **roles, "vocab_size": tokenizer.size})), std)
        can_embed = embeds(hf_model_of(model.config))
        export(model.state_dict(), model.config, tokenizer, folder / names[name], embeds=can_embed)
        ours[name] = rows_of(model, tokenizer, given)
        print(f"{name}: {len({str(row) for row in ours[name]['rows']})} different texts", flush=True)
    (folder / OURS).write_text(json.dumps(ours))
    return ours


def rows_of(model: Any, tokenizer: Tokenizer, given: list[str]) -> dict[str, Any]:
    """Our greedy ids behind each prompt, and the mean of the encoder's states if the export has an encoder to embed."""
    family, vocabulary = FAMILIES[model.config.family], tokenizer.vocabulary
    rows: list[list[int]] = []
    means: list[list[float]] = []
    for prompt in given:
        (ids,) = tokenizer.encode([prompt])
        if family.generates != "continuations":
            begins = family.inputs_begin_with_bos or family.generates is None
            ids = [*([vocabulary.bos] if begins else []), *ids, vocabulary.eos]
        inputs = torch.tensor([ids])
        if family.generates is not None:
            settings = GenerationSettings(max_new_tokens=engines.NEW_TOKENS)
            rows.append(cut(generate(model, inputs, None, settings)[0].tolist()))
        if embeds(hf_model_of(model.config)):
            with torch.no_grad():
                means.append(model.encode(inputs)[0].mean(0).tolist())
    return {"rows": rows, "means": means}


def cut(ids: list[int]) -> list[int]:
    """Up to EOS, which programs may leave out or write padding behind."""
    return ids[: ids.index(engines.EOS) + 1] if engines.EOS in ids else ids


def environment(folder: Path, program: str) -> Path:
    """The Python of an environment that has `program`, beside the packages of this environment."""
    name = program.replace(" ", "-").lower()
    python = folder / "environments" / name / "bin/python"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
        where = sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})
        (Path(where) / "torch.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[program]], check=True)
    if program == "llama.cpp" and not [*folder.glob("llama_cpp_python-*/")]:
        command = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder, SOURCES]
        subprocess.run(command, check=True)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)
    return python


def cell(program: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What the table says of a program and a model."""
    if not ours["rows"] and program != "sentence-transformers":
        return "—"  # writes no text
    if "error" in theirs:
        error = str(theirs["error"])
        return next((reason for words, reason in REASONS.items() if words in error), error)
    if program == "sentence-transformers":
        pairs = zip(ours["means"], theirs["rows"], strict=True)
        return f"{max(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in pairs):.0e}"
    if program == "peft":
        first, last, same = theirs["rows"]
        return f"{first:.2f} → {last:.2f}; merged, {same} of {len(ours['rows'])}"
    equal = sum(cut(one) == other for one, other in zip(theirs["rows"], ours["rows"], strict=True))
    return f"{equal} of {len(ours['rows'])}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--programs", nargs="+", choices=PACKAGES, default=[*PACKAGES], help="by default all")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    ours = json.loads((folder / OURS).read_text()) if (folder / OURS).exists() else make(folder)
    for program in arguments.programs:
        python = environment(folder, program)
        with (folder / f"{program}.log").open("w") as log:
            subprocess.run([python, engines.__file__, program, folder], stdout=log, stderr=log, check=True)
    found = {program: folder / f"{program}.json" for program in PACKAGES}
    theirs = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["model", *theirs])
        for name in MODELS:
            writer.writerow([name, *(cell(program, ours[name], rows[name]) for program, rows in theirs.items())])
    print(FILE.read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
