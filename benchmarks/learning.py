"""Does each family learn?

    python benchmarks/learning.py [--write docs/results/models.md]

Each family takes 200 steps on the shipped text, as a user would run them: `data-pipeline build`, then `launch local`
with two ranks at ZeRO stage 2.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from families import KINDS, arguments_of, show
from harness import ROOT, Json, Table

from pretrain.models import outline, parse
from pretrain.run.metrics_file import read_metrics

STEPS, ROWS = 200, 32
WIDTH: Json = {"d_model": 128, "num_heads": 4}
STACKS: Json = {**WIDTH, "num_encoder_layers": 2, "num_decoder_layers": 2}
LAYERS: Json = {**WIDTH, "num_layers": 2, "d_ff": 256}
# T5's and vanilla's first losses are near ln V with smaller first logits than the published ones
SMALL_LOGITS: Json = {"init_output_std": 0.5}
# 1/√d_model: 0.02 is for wide models
WIDE_WEIGHTS: Json = {"init_std": 0.088}
SPANS, NOISED, CAUSAL, MASKED = "span_corruption", "denoising", "causal_lm", "masked_lm"
OBJECTIVES: dict[str, Json] = {
    SPANS: {"objective": {"name": SPANS, "inputs_length": 96}},
    NOISED: {"packing": "complete_documents", "objective": {"name": NOISED, "length": 96}},
    CAUSAL: {"objective": {"name": CAUSAL, "length": 96}},
    MASKED: {"packing": "sentence_pairs", "objective": {"name": MASKED, "length": 96, "next_sentence": True}},
}
SPECIAL_TOKENS = {NOISED: ["<mask>", "<s>"], MASKED: ["[CLS]", "[SEP]", "<mask>"]}
TRAINED: dict[str, tuple[str, Json, float]] = {
    "T5 v1.0": (SPANS, {**STACKS, **SMALL_LOGITS, "d_kv": 32, "d_ff": 512}, 3e-3),
    "T5 v1.1": (SPANS, {**STACKS, **SMALL_LOGITS, "d_kv": 32, "d_ff": 256}, 3e-3),
    "BART": (NOISED, {**STACKS, "d_ff": 512, "max_positions": 96}, 1e-3),
    "vanilla": (SPANS, {**STACKS, **SMALL_LOGITS, "d_ff": 512}, 1e-3),
    "modern": (SPANS, {**WIDE_WEIGHTS, "encoder": LAYERS, "decoder": LAYERS}, 3e-3),
    "T5Gemma": (SPANS, {**WIDE_WEIGHTS, "encoder": LAYERS, "decoder": LAYERS}, 3e-3),
    "T5Gemma 2": (SPANS, {**WIDE_WEIGHTS, **LAYERS}, 3e-3),
    "double_decoder": (CAUSAL, {**STACKS, "num_encoder_layers": 3, "d_ff": 512}, 1e-3),
    "autoregressive": (CAUSAL, {**STACKS, "d_ff": 512, "max_positions": 96}, 1e-3),
    "autoregressive, without embedding loss": (
        CAUSAL,
        {**STACKS, "d_ff": 512, "max_positions": 96, "embedding_loss": None},
        1e-3,
    ),
    "decoder_only": (CAUSAL, {**WIDTH, "num_layers": 5, "d_ff": 512, "max_positions": 96}, 1e-3),
    "encoder_only": (MASKED, {**WIDTH, "num_layers": 5, "d_ff": 512, "max_positions": 96}, 1e-3),
}


def command(name: str, *arguments: str | Path) -> None:
    """Runs one of this project's commands as a user does."""
    program = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(program)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def build_corpora(folder: Path) -> dict[str, Path]:
    """Builds a corpus of the shipped text for each objective; all use the pieces of the first one's tokenizer."""
    made: dict[str, Path] = {}
    for objective, rows in OBJECTIVES.items():
        tokenizer: Json = {"special_tokens": SPECIAL_TOKENS.get(objective, [])}
        tokenizer["sentinels"] = 100 if objective == SPANS else 0
        if made:
            tokenizer["path"] = str(made[SPANS] / "tokenizer/spiece.model")
        values = {
            "extends": [str(ROOT / "configs/corpora/quickstart.yaml")],
            "name": objective.replace("_", "-"),
            "output": str(folder / objective),
            "tokenizer": tokenizer,
            "rows": rows,
        }
        path = folder / f"{objective}.yaml"
        path.write_text(json.dumps(values))  # JSON is YAML
        command("data-pipeline", "build", path)
        made[objective] = folder / objective
    return made


@dataclass(frozen=True)
class Run:
    """The results of a training run; losses are in nats per token."""

    parameters: int
    expected: float
    first: float
    last: float
    validation: float
    text: float
    word_counts: float


def train(kind: str, corpora: dict[str, Path], folder: Path) -> Run:
    objective, sizes, rate = TRAINED[kind]
    settings = KINDS.get(kind.split(",")[0], {"family": kind})
    name = kind.lower().replace(",", "").replace(" ", "-")
    values = {
        "run": {"name": name, "directory": str(folder / name), "seed": 0, "max_steps": STEPS, "cpu_threads": 1},
        "model": {
            **{key: value for key, value in settings.items() if not key.startswith(("num_", "bos_"))},
            **sizes,
        },
        "data": {
            "train": [{"corpus": str(corpora[objective])}],
            "validation": [{"corpus": str(corpora[objective])}],
            "workers": 0,
        },
        "batch": {"global_batch_size": ROWS},
        "optimizer": {"learning_rate": rate, "betas": [0.9, 0.98], "gradient_clipping": 1.0},
        "schedule": {"name": "cosine", "warmup_steps": 30},
        "precision": "fp32",
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "checkpoint": {"every_steps": STEPS},
        "evaluation": [{"hook": "validation_loss", "every_steps": STEPS}],
        "tracking": {"mlflow": None, "log_every_steps": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(values))
    command("launch", "local", path, "--ranks", "2")
    rows = read_metrics(folder / name)
    losses = [row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics]
    assert len(losses) == STEPS
    found = {key.rsplit("/", 1)[1]: value for row in rows for key, value in row.metrics.items() if "validation" in key}
    saved = json.loads(next((folder / name / "checkpoints").glob("step-*/index.json")).read_text())["identity"]["model"]
    config = parse(saved)
    parameters = outline(config).num_parameters()
    return Run(
        parameters,
        math.log(config.padded_vocab_size),
        losses[0],
        statistics.mean(losses[-20:]),
        found["loss"],
        found["text_loss"],
        found["unigram_entropy"],
    )


def row_of(kind: str, run: Run) -> list[str]:
    losses = (run.expected, run.first, run.last, run.validation, run.text, run.word_counts)
    return [
        kind,
        TRAINED[kind][0],
        f"{run.parameters:,}",
        *(f"{loss:.3f}" for loss in losses),
    ]


def training(folder: Path) -> Table:
    corpora = build_corpora(folder)
    rows = []
    for kind in TRAINED:
        rows.append(row_of(kind, train(kind, corpora, folder)))
        print(*rows[-1], flush=True)
    columns = [
        "family",
        "objective",
        "parameters",
        "ln V",
        "loss of step 1",
        "of the last 20",
        "validation",
        "of text",
        "word counts alone",
    ]
    return Table(f"Training: {STEPS} steps of {ROWS} rows, two CPU ranks, ZeRO stage 2, fp32", columns, rows)


def main() -> None:
    arguments = arguments_of(__doc__)
    with tempfile.TemporaryDirectory() as name:
        show([training(Path(name))], arguments.write)


if __name__ == "__main__":
    main()
