"""A corpus of each kind of tokenizer is built, trained on, evaluated, generated from, exported and imported."""

import json
import re

import pytest
import torch
import transformers
from typer.testing import CliRunner

from data_pipeline.corpus import open_corpus
from pretrain import cli
from pretrain.engine.checkpoint.trained import TrainedModel
from tests.conftest import write_c4, write_corpus_file
from tests.support.in_process import done_here
from tests.support.reading import c4_pages
from tests.support.runs import losses, run_file, train_ranks
from tests.support.tables import each

KINDS = {
    "bytes": {"kind": "bytes", "sentinels": 20},
    "characters": {"kind": "symbols", "sentinels": 20},
    "words": {"kind": "symbols", "pattern": r"\w+|[^\w\s]|\s", "vocab_size": 300, "sentinels": 20},
    "bpe": {"kind": "bpe", "vocab_size": 400, "sentinels": 20},
}
CLASSES = {"bytes": "ByT5Tokenizer"}
WORDS = "Thank you <extra_id_0> me to your party <extra_id_1> week"


def invoke(*arguments):
    done = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert done.exit_code == 0, done.exception
    return done.output


@each("kind", KINDS)
def test_every_program_works_with_the_kind_and_its_export_has_equal_ids(kind, tmp_path):
    write_c4(tmp_path / "c4.json.gz", records=40)
    done_here("data-pipeline", "build", write_corpus_file(tmp_path / "corpus.yaml", tokenizer=KINDS[kind]))
    ours = open_corpus(tmp_path / "corpus").tokenizer
    assert "<extra_id_0>" in done_here("data-pipeline", "show", tmp_path / "corpus")
    done_here("data-pipeline", "stats", tmp_path / "corpus", "--json")
    done_here("data-pipeline", "verify", tmp_path / "corpus")
    path = run_file(
        tmp_path,
        tmp_path / "corpus",
        run={"max_steps": 3},
        batch={"global_batch_size": 8, "micro_batch_size": 8},
        evaluation=[],
    )
    assert train_ranks(path, 1) == [0]
    assert losses(path)[3] < losses(path)[1]
    checkpoint = tmp_path / "run"
    invoke("evaluate", checkpoint, "--corpus", tmp_path / "corpus", "--hook", "validation_loss")
    invoke("generate", checkpoint, WORDS, "--max-new-tokens", 3)
    invoke("export", checkpoint, tmp_path / "exported")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert type(theirs).__name__ == CLASSES.get(kind, "TokenizersBackend")
    texts = [text for page in c4_pages() for text in page.split("\n")][:1000]
    assert len(texts) == 1000
    assert ours.encode(texts) == theirs(texts, add_special_tokens=False).input_ids
    assert ours.encode_with_sentinels(WORDS) == theirs(WORDS).input_ids
    invoke("import", tmp_path / "exported", tmp_path / "imported")
    imported = TrainedModel.open(tmp_path / "imported").tokenizer
    assert imported.vocabulary.sentinel_ids == ours.vocabulary.sentinel_ids
    assert imported.encode(texts) == ours.encode(texts)
    if kind != "bpe":  # a tokenizer.json of any origin is of kind tokenizer_json
        assert imported.describe() == ours.describe()


def test_every_program_works_with_ids_and_the_export_says_how_to_call_the_model(tmp_path):
    pages = ["".join(f" {ord(character) % 100}" for character in page)[1:] for page in c4_pages()[:40]]
    lines = (json.dumps({"ids": [*map(int, one.split())]}) + "\n" for one in pages)
    (tmp_path / "items.jsonl").write_text("".join(lines))
    source = {"format": "jsonl", "path": str(tmp_path / "items.jsonl"), "options": {"ids": "ids"}}
    kind = {"kind": "ids", "vocab_size": 100, "sentinels": 20, "special_tokens": ["<mask>"]}
    file = write_corpus_file(tmp_path / "corpus.yaml", tokenizer=kind, sources=[source])
    done_here("data-pipeline", "build", file)
    done_here("data-pipeline", "verify", tmp_path / "corpus")
    ours = open_corpus(tmp_path / "corpus").tokenizer
    hooks = [{"hook": "validation_loss", "every_steps": 3}, {"hook": "samples", "every_steps": 3, "number": 1}]
    path = run_file(
        tmp_path,
        tmp_path / "corpus",
        run={"max_steps": 3},
        batch={"global_batch_size": 8, "micro_batch_size": 8},
        evaluation=hooks,
    )
    assert train_ranks(path, 1) == [0]
    assert losses(path)[3] < losses(path)[1]
    checkpoint = tmp_path / "run"
    prompt = "3 17 <extra_id_0> 99 5 <extra_id_1> 8"
    invoke("evaluate", checkpoint, "--corpus", tmp_path / "corpus", "--hook", "validation_loss")
    assert "masked    3 17 <extra_id_0> 99 5" in invoke("generate", checkpoint, prompt, "--max-new-tokens", 3)
    written = invoke("generate", checkpoint, "3 17 5", "--max-new-tokens", 3)
    (tmp_path / "allowed.txt").write_text("7 8 9\n")
    assert invoke("generate", checkpoint, "3 17", "--num-beams", 2, "--allowed", tmp_path / "allowed.txt") == "7 8 9\n"
    said = invoke("export", checkpoint, tmp_path / "exported")
    card = (tmp_path / "exported/README.md").read_text()
    assert "it has no tokenizer, and README.md shows a call with ids" in " ".join(said.split())
    assert "AutoTokenizer" not in card + said
    assert "Other ids: `<pad>` 100, `</s>` 101, `<mask>` 102. Masked spans are `<extra_id_0>` 122 to" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    known: dict = {}
    exec(code.replace("DIRECTORY", str(tmp_path / "exported")), known)
    assert known["input_ids"].tolist() == [[0, 1, 2, 101]]
    ids = torch.tensor([ours.encode_with_sentinels("3 17 5")])
    answer = known["model"].generate(ids, max_new_tokens=3, do_sample=False)[0, 1:].tolist()
    assert written == ours.decode(answer) + "\n"
    invoke("import", tmp_path / "exported", tmp_path / "imported")
    assert TrainedModel.open(tmp_path / "imported").tokenizer.describe() == ours.describe()


@pytest.mark.slow
@each("family", ["bart", "decoder_only"])
def test_bytes_of_families_with_other_marks_than_byt5s_are_exported_as_tokenizer_json(family, tmp_path):
    """ByT5Tokenizer ends every text with EOS, and begins none."""
    write_c4(tmp_path / "c4.json.gz", records=40)
    tokenizer = {"kind": "bytes", "sentinels": 5, "special_tokens": ["<s>", "<mask>"]}
    sizes = {"family": family, "d_model": 32, "d_ff": 64, "num_heads": 4, "dropout_rate": 0.0}
    layers, objective = {
        "bart": ({"num_encoder_layers": 1, "num_decoder_layers": 1}, {"name": "denoising", "length": 64}),
        "decoder_only": ({"num_layers": 1, "max_positions": 64}, {"name": "causal_lm", "length": 63}),
    }[family]
    rows = {"objective": objective}
    done_here("data-pipeline", "build", write_corpus_file(tmp_path / "corpus.yaml", tokenizer=tokenizer, rows=rows))
    ours = open_corpus(tmp_path / "corpus").tokenizer
    path = run_file(tmp_path, tmp_path / "corpus", run={"max_steps": 1}, model=sizes | layers, evaluation=[])
    assert train_ranks(path, 1) == [0]
    invoke("export", tmp_path / "run", tmp_path / "exported")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    texts = c4_pages()[:20]
    assert ours.encode(texts) == theirs(texts, add_special_tokens=False).input_ids
    invoke("import", tmp_path / "exported", tmp_path / "imported")
    assert TrainedModel.open(tmp_path / "imported").tokenizer.describe() == ours.describe()
