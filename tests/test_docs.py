"""Figures that commands print in the docs, computed again. Those of `pretrain plan` are in pretrain/test_plan.py, those
of docs/results/recipes.md in pretrain/test_recipes.py."""

import re
from pathlib import Path

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation.config_file import load
from pretrain import models
from pretrain.config import RunConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
IDS_OF_LETTERS = 140  # of the reversal's tokenizer: 40 pieces and 100 sentinels


def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def parameters(path: Path, *overrides: str) -> int:
    return models.outline(load(path, list(overrides), RunConfig).model).num_parameters()


def ids(corpus: str) -> int:
    tokenizer = load(ROOT / f"configs/corpora/{corpus}.yaml", [], CorpusConfig).tokenizer
    return tokenizer.vocab_size + tokenizer.sentinels


def test_the_parameters_of_the_small_experiment():
    folder, vocabulary = ROOT / "configs/experiments/autoregressive-small", ids("wikipedia-2014-small")
    table = page("results/experiments").split("| row | parameters |")[1]
    shown = dict(re.findall(r"^\| `([\w-]+)`\*? \| (\d{3},\d{3}) ", table, re.MULTILINE))
    assert shown == {
        name: f"{parameters(folder / f'{name}.yaml', f'model.vocab_size={vocabulary}'):,}" for name in shown
    }
    assert set(shown) == {path.stem for path in folder.glob("*.yaml")} - {"experiment"}


def test_the_sizes_and_bounds_of_the_readme():
    sizes = [
        parameters(ROOT / "configs/runs/quickstart.yaml", f"model.vocab_size={ids('quickstart')}"),
        parameters(ROOT / "configs/runs/reversal.yaml", f"model.vocab_size={IDS_OF_LETTERS}"),
    ]
    assert re.findall(r"of (\d\.\d) M parameters", README) == [f"{size / 1e6:.1f}" for size in sizes]
    corpus = load(ROOT / "configs/corpora/quickstart.yaml", [], CorpusConfig)
    assert f"vocabulary of {corpus.tokenizer.vocab_size:,} tokens" in README
    assert re.search(rf"rows of {corpus.rows.objective.raw_length}\s+tokens", README)


def test_the_share_of_rows_in_a_mixture_by_tokens():
    sentence = r"for (\d+) % and (\d+) % of the tokens,\s+from rows of (\d+) and of (\d+) tokens, (\d+) %"
    found = re.search(sentence, page("how-to/train-a-task"))
    assert found is not None
    first, second, long, short, rows = map(int, found.groups())
    assert round(100 * (second / short) / (first / long + second / short)) == rows


def test_a_corpus_file_says_where_the_files_come_from_that_do_not_ship():
    """By a command, an address or a page, in the file itself or in one that it extends."""
    folder = ROOT / "configs/corpora"
    for path in sorted(folder.glob("*.yaml")):
        text, extended = "", [path.name]
        while extended:
            own = (folder / extended.pop()).read_text(encoding="utf-8")
            text += own
            extended += re.findall(r"[\w-]+\.yaml", "".join(re.findall(r"(?m)^extends:.*", own)))
        if any(source.path.startswith("data/") for source in load(path, [], CorpusConfig).sources):
            assert re.search(r"data-pipeline fetch \w+ |https?://\S+|docs/\S+\.md|wikiextractor \S+", text), path.name
