"""The claims, each with the README's or a results page's figure, and what it is compared with."""

import gzip
import io
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pretrain
from checks.prove.proof import (
    CLIP,
    DECAY,
    EPS,
    MICRO,
    MODEL,
    RANKS,
    RATE,
    ROWS,
    SEED_OF_RUNS,
    STEPS,
    Proof,
    Wrong,
    checksums,
    losses,
)

TOP = Path(__file__).parents[2]
_ROUNDING = 1e-5  # of a loss: fp32 sums of other orders; a lost row or a wrong mean changes 1e-3 of it and more
_OF_RATE = 1e-3  # of one step, after all of them
_OF_LOSS = 1e-4  # of a token, of about 8 nats: the README's table has 3e-5 of logits of 5.3
_LEAST_WORTH = 1.5  # nats: runs of other seeds are above; a decoder that doesn't read its input is at 0
_ROWS_OF_SPANS = 500
# C4's rules of single pages, as in c4_utils; languages and bad words aside, which know pages and not their lines
_C4_RULES = {
    "max_page_characters": 190_000,
    "web_rules": True,
    "max_word_length": 1000,
    "min_words_per_line": 5,
    "min_sentences_per_page": 3,
}


@dataclass(frozen=True)
class Claim:
    """`figure`: what the page says. `holds` returns what was found here, and raises Wrong if the claim doesn't hold.
    `look`: where to look then."""

    text: str
    figure: str
    holds: Callable[[Proof], str]
    look: str


def same_bytes(proof: Proof) -> str:
    """Files of a corpus: one worker; two workers; two workers, all processes killed at a random moment, again."""
    wanted, stage = checksums(proof.corpus), proof.random.randrange(2, 6)
    for name in ("two-workers", "killed"):
        command = ("data_pipeline", "build", proof.corpus_file(name), "ray.num_cpus=2", "ray.small_bytes=0")
        if name == "killed":
            proof.kill_in_stage(proof.start(*command), proof.folder / name, stage)
        proof.run(*command)
        found = checksums(proof.folder / name)
        differing = sorted(path for path in wanted | found if wanted.get(path) != found.get(path))
        if differing:
            raise Wrong(f"{name}: {differing[0]} differs, and {len(differing) - 1} more files")
    return f"{len(wanted)} files, one killed in stage {stage}: equal"


def c4_pages(proof: Proof) -> str:
    """Published pages of C4 have passed C4's rules already, so the rules must leave them as they are."""
    import pyarrow.parquet as pq

    sample = TOP / "data_pipeline/samples/c4-train.00000-of-01024-first1000.json.gz"
    with gzip.open(sample, "rt", encoding="utf-8") as lines:
        published = [json.loads(line)["text"] for line in lines]
    settings = {
        "name": "c4",
        "output": "c4",
        "sources": [{"format": "jsonl", "name": "c4", "language": "en", "path": str(sample)}],
        "cleaning": {"profile": "none", **_C4_RULES},
        "dedup": {"urls": None, "lines": False, "spans": False, "documents": False, "minhash": None},
    }
    proof.run("data_pipeline", "documents", proof.file("c4.yaml", settings))
    parts = sorted((proof.folder / "c4/documents").glob("*.parquet"))
    kept = {text for part in parts for text in pq.read_table(part, columns=["text"])["text"].to_pylist()}
    unchanged = sum(page in kept for page in published)
    if unchanged < 999:
        raise Wrong(f"{unchanged} of {len(published)} pages pass unchanged")
    return f"{unchanged} of {len(published):,}"


def resumes(proof: Proof) -> str:
    """A run with dropout, killed and started again, against one that wasn't: losses, weights, moments."""
    changes = {"deepspeed": {"zero_optimization": {"stage": 2}}, "model": {**MODEL, "dropout_rate": 0.1}}
    whole, killed = proof.folder / "whole", proof.folder / "killed-run"
    proof.run("launch", "local", proof.run_file("whole", **changes), "--ranks", str(RANKS))
    command = ("launch", "local", proof.run_file("killed-run", **changes), "--ranks", str(RANKS))
    proof.kill_after_step(proof.start(*command), killed, proof.at)
    before = len(losses(killed))
    proof.run(*command)
    found, wanted = losses(killed), losses(whole)
    if steps := [step for step in range(1, STEPS + 1) if found.get(step) != wanted.get(step)]:
        raise Wrong(f"killed after step {before}; the loss of step {steps[0]} differs")
    ours, theirs = _last_tensors(killed), _last_tensors(whole)
    if differing := [name for name in theirs | ours if ours.get(name) != theirs.get(name)]:
        raise Wrong(f"killed after step {before}; {differing[0]} differs in the last checkpoint")
    return f"killed after step {before}: {STEPS} losses, all tensors equal"


def _last_tensors(run: Path) -> dict[str, bytes]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in sorted(newest.glob("*.safetensors"))}


def other_ranks(proof: Proof) -> str:
    """A run that is stopped and resumed on one rank at stage 3, against two ranks at stage 1."""
    file = proof.run_file("moved")
    proof.run("launch", "local", file, "--ranks", str(RANKS), "--stop-at-step", str(proof.at), code=75)
    proof.run("launch", "local", file, "--ranks", "1", "deepspeed.zero_optimization.stage=3")
    return _agree(losses(proof.folder / "moved"), losses(proof.plain), f"one rank, stage 3 from step {proof.at + 1}")


def _agree(found: dict[int, float], wanted: dict[int, float], what: str) -> str:
    if missing := sorted(wanted.keys() - found.keys()):
        raise Wrong(f"step {missing[0]} is missing")
    differences = {step: abs(found[step] - loss) / loss for step, loss in wanted.items()}
    worst = max(differences, key=lambda step: differences[step])
    if not differences[worst] <= _ROUNDING:
        raise Wrong(f"loss {found[worst]:.6f} in place of {wanted[worst]:.6f} in step {worst}")
    return f"{what}: losses within {differences[worst]:.0e}"


def global_batch(proof: Proof) -> str:
    """The run's losses against transformers' T5 and PyTorch's AdamW: one batch, one mean over all its targets."""
    expected, _ = _plain_loop(proof)
    return _agree(losses(proof.plain), expected, f"{RANKS} ranks with {ROWS // RANKS // MICRO} micro-batches")


def optimizer(proof: Proof) -> str:
    """The run's weights after the last step against those of the plain loop."""
    from safetensors.torch import load_file

    _, model = _plain_loop(proof)
    found, wanted = load_file(proof.exported(proof.plain) / "model.safetensors"), dict(model.named_parameters())
    if lost := wanted.keys() - found.keys():
        raise Wrong(f"the export lacks {min(lost)}")
    differences = {name: float((found[name] - one.detach()).abs().max()) for name, one in wanted.items()}
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= _OF_RATE * RATE:
        raise Wrong(f"an element of {worst} differs by {differences[worst]:.1e}; a step is {RATE:g}")
    return f"after {STEPS} steps of {RATE:g}: weights within {differences[worst]:.0e}"


def _plain_loop(proof: Proof) -> tuple[dict[int, float], Any]:
    """The loss of each step, and the model after the last, of a loop that knows nothing of ranks and micro-batches."""
    from transformers import T5ForConditionalGeneration

    import data_pipeline

    model = T5ForConditionalGeneration.from_pretrained(proof.exported(proof.first_weights)).eval()
    vectors = [one for name, one in model.named_parameters() if "layer_norm" in name]
    matrices = [one for name, one in model.named_parameters() if "layer_norm" not in name]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=EPS, weight_decay=DECAY)
    found = dict[int, float]()
    rows = iter(data_pipeline.open(proof.uneven).loader("train", ROWS, seed=SEED_OF_RUNS))
    for step in range(1, STEPS + 1):
        batch = next(rows)
        read = model(batch["encoder_input_ids"], batch.get("encoder_attention_mask"), labels=batch["labels"])
        found[step] = float(read.loss.detach())  # transformers' mean over all targets but -100
        adamw.zero_grad()
        read.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
    return found, model


def span_corruption(proof: Proof) -> str:
    """T5's definition, row by row: noise tokens, spans, sentinels; and the row is found again in inputs and targets."""
    import data_pipeline

    corpus = data_pipeline.open(proof.corpus)
    vocabulary = corpus.tokenizer.vocabulary
    step = vocabulary.sentinel_step
    number_of = {vocabulary.first_sentinel + step * number: number for number in range(vocabulary.sentinels)}
    rows = dict[int, list[int]]()
    for epoch in (0, 1):
        for example in islice(corpus.examples("train", epoch), _ROWS_OF_SPANS):
            kept, masked = _parts(example.inputs, number_of), _parts(example.targets, number_of)
            spans = len(kept) - 1
            if not [one for one, _ in kept] == [one for one, _ in masked] == [*range(-1, spans)]:
                raise Wrong(f"row {example.row}: sentinels are out of order")
            row = [id_ for (_, span), (_, after) in zip(masked, kept, strict=True) for id_ in span + after]
            length, noise = len(row), sum(len(span) for _, span in masked)
            expected = min(max(int(np.round(np.float32(length) * np.float32(0.15))), 1), length - 1)
            if noise != expected or spans != max(round(noise / 2), 1):
                raise Wrong(f"row {example.row}: {noise} tokens in {spans} spans, of {length}")
            if rows.setdefault(example.row, row) != row:
                raise Wrong(f"row {example.row} has other tokens in epoch 1")
    return f"{len(rows)} rows in two epochs"


def _parts(ids: list[int], number_of: dict[int, int]) -> list[tuple[int, list[int]]]:
    """(number of the sentinel, the ids after it), first (-1, the ids before any); without the EOS at the end."""
    found: list[tuple[int, list[int]]] = [(-1, [])]
    for id_ in ids[:-1]:
        if id_ in number_of:
            found.append((number_of[id_], []))
        else:
            found[-1][1].append(id_)
    return found


def exports(proof: Proof) -> str:
    """The export in transformers against the run's own model: the loss of each token, and greedy texts."""
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    import data_pipeline

    own, _ = pretrain.load(proof.plain)
    theirs = T5ForConditionalGeneration.from_pretrained(proof.exported(proof.plain)).eval()
    tokenizer = AutoTokenizer.from_pretrained(proof.exported(proof.plain))
    corpus = data_pipeline.open(proof.corpus)
    batch = next(iter(corpus.loader("validation", 8)))
    with torch.no_grad():
        ours = own(**batch)["labels"]
        logits = theirs(batch["encoder_input_ids"], labels=batch["labels"]).logits
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    largest = float((ours - expected).abs().max())
    held_out = islice(corpus.examples("validation"), 20)
    texts = [_words(one.inputs_text)[:60] + " <extra_id_0>" for one in held_out]
    answers = own.generate(texts, max_new_tokens=12)
    equal = 0
    for text, answer in zip(texts, answers, strict=True):
        made = theirs.generate(tokenizer(text, return_tensors="pt").input_ids, max_new_tokens=12, do_sample=False)
        equal += _words(tokenizer.decode(made[0])) == _words(answer.generated)
    if not largest <= _OF_LOSS or equal < len(texts):
        raise Wrong(f"the loss of a token differs by {largest:.1e}; {equal} of {len(texts)} texts are equal")
    return f"losses within {largest:.0e} of {float(expected.max()):.1f}; {equal} of {len(texts)} texts equal"


def _words(text: str) -> str:
    """The text without sentinels and special tokens."""
    return " ".join(re.sub("<[^>]*>", " ", text).split())


def damaged_shard(proof: Proof) -> str:
    """A flipped bit in a shard: `verify` names the file, `build --repair` brings back its bytes."""
    shard = proof.random.choice(sorted((proof.corpus / "shards").rglob("*.tar")))
    before = shard.read_bytes()
    position = proof.random.randrange(len(before))
    damaged = bytearray(before)
    damaged[position] ^= 1 << proof.random.randrange(8)
    shard.write_bytes(damaged)
    if shard.name not in proof.run("data_pipeline", "verify", str(proof.corpus), code=1):
        raise Wrong(f"verify doesn't name {shard.name}")
    proof.run("data_pipeline", "build", proof.corpus_file("corpus"), f"output={proof.corpus}", "--repair")
    if shard.read_bytes() != before:
        raise Wrong(f"{shard.name} isn't what it was")
    return f"byte {position:,} of {shard.name}: named, repaired"


class _Opens:
    """What a pickle of a downloaded model may hold: a call that writes a file when it is read."""

    def __init__(self, path: str):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


def hostile_input(proof: Proof) -> str:
    """A model with a pickle that would run code is refused in one line, and nothing is run or written."""
    marker, model, out = (proof.folder / name for name in ("it-has-run", "hostile", "imported"))
    model.mkdir(exist_ok=True)
    for file in proof.exported(proof.first_weights).iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    content = io.BytesIO()
    pickle.dump({"shared.weight": _Opens(str(marker))}, content)
    (model / "pytorch_model.bin").write_bytes(content.getvalue())
    process = proof.start("pretrain", "import", str(model), str(out))
    output = process.communicate()[0].strip().splitlines()
    if marker.exists():
        raise Wrong("its code was run")
    if process.returncode == 0 or "Traceback" in "".join(output) or out.exists():
        raise Wrong(f"exit code {process.returncode}, {len(output)} lines")
    return "no code run, nothing written"


def input_use(proof: Proof) -> str:
    """The quickstart's run, with the seed of this proof: the loss with another row's input, less the loss."""
    if proof.text:
        return "left out: the figure is of the King James Bible"
    corpus = proof.folder / "quickstart"
    proof.run("data_pipeline", "build", str(TOP / "configs/corpora/quickstart.yaml"), f"output={corpus}")
    changes = [f"data.{split}=[{{corpus: {corpus}}}]" for split in ("train", "validation")]
    changes += [f"run.seed={proof.seed % 1000}", "evaluation=[]", "run.directory=reads", "tracking.mlflow=null"]
    proof.run("launch", "local", str(TOP / "configs/runs/quickstart.yaml"), "--ranks", str(RANKS), *changes)
    output = proof.run("pretrain", "evaluate", "reads", "--hook", "input_use", "--json")
    found = json.loads(output[output.index("{") :])
    (worth,) = (float(value) for name, value in found.items() if name.endswith("/worth"))
    if not worth >= _LEAST_WORTH:
        raise Wrong(f"{worth:.2f} nats")
    return f"{worth:.2f} nats with seed {proof.seed % 1000}"


def results(_: Proof) -> str:
    """Every table of docs/results from the data beside it."""
    command = [sys.executable, "-m", "checks.results"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    if done.returncode:
        raise Wrong(last)
    return last


CLAIMS = (
    Claim("A corpus has the same bytes", "for any workers and kills", same_bytes, "docs/explanation/determinism.md"),
    Claim("C4's pages pass C4's rules", "999 of 1,000", c4_pages, "data_pipeline/text/cleaning/page.py"),
    Claim("A killed run resumes to the bit", "equal", resumes, "pretrain/engine/checkpoint"),
    Claim("Other ranks, another ZeRO stage", "equal but for rounding", other_ranks, "pretrain/engine/checkpoint"),
    Claim("The loss is the global batch's mean", "as in a plain loop", global_batch, "pretrain/engine/engine.py"),
    Claim("AdamW under ZeRO is PyTorch's", "as in a plain loop", optimizer, "pretrain/engine/optimizers"),
    Claim("Span corruption is T5's", "its definition", span_corruption, "data_pipeline/corpus/objectives"),
    Claim("Models export to transformers", "within 3e-5 of 5.3", exports, "pretrain/export"),
    Claim("A damaged shard is named and repaired", "byte for byte", damaged_shard, "data_pipeline/corpus/verify.py"),
    Claim("A hostile model runs no code", "refused in one line", hostile_input, "pretrain/export/load.py"),
    Claim("The quickstart's model reads its input", "2.33 nats", input_use, "pretrain/evaluate/input_use.py"),
    Claim("Pages say what their data say", "0 differences", results, "checks/results"),
)
