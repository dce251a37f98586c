"""Figures that commands print in the docs, computed again, and the pictures that docs/pictures draws. The figures of
`pretrain plan` are in pretrain/cli/test_runs.py, those of docs/results/recipes.md in pretrain/config/test_recipes.py.
"""

import gzip
import hashlib
import json
import re
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from data_pipeline.base.config_file import load
from data_pipeline.config import CorpusConfig
from docs.pictures import loss_curves, objectives, plans, speedrun
from pretrain import models
from pretrain.config import RunConfig
from pretrain.models.flops import Sizes, count_flops
from tests.support.tables import each

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
IDS_OF_LETTERS = 140  # of the reversal's tokenizer: 40 pieces and 100 sentinels


def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def parameters(path: Path, *overrides: str) -> int:
    return models.meta_model(load(path, list(overrides), RunConfig).model).num_parameters()


def ids(corpus: str) -> int:
    tokenizer = load(ROOT / f"configs/corpora/{corpus}.yaml", [], CorpusConfig).tokenizer
    return tokenizer.vocab_size + tokenizer.sentinels


def test_the_parameters_of_the_small_experiment():
    folder, vocabulary = ROOT / "configs/experiments/autoregressive-small", ids("wikipedia-2014-small")
    table = page("results/experiments").split("| row | parameters |")[1]
    shown = dict(re.findall(r"^\| `([\w-]+)`\*? \| (\d{3},\d{3}) ", table, re.MULTILINE))
    for name, count in shown.items():
        assert count == f"{parameters(folder / f'{name}.yaml', f'model.vocab_size={vocabulary}'):,}", name
    assert set(shown) == {path.stem for path in folder.glob("*.yaml")} - {"experiment"}


def test_the_sizes_of_the_quickstart():
    first_run = page("tutorials/first-run")
    sizes = [
        parameters(ROOT / "configs/runs/quickstart.yaml", f"model.vocab_size={ids('quickstart')}"),
        parameters(ROOT / "configs/runs/reversal.yaml", f"model.vocab_size={IDS_OF_LETTERS}"),
    ]
    assert re.findall(r"of (\d\.\d) M parameters", README + first_run) == [f"{sizes[i] / 1e6:.1f}" for i in (0, 0, 1)]
    corpus = load(ROOT / "configs/corpora/quickstart.yaml", [], CorpusConfig)
    assert f"vocabulary of {corpus.tokenizer.vocab_size:,} tokens" in first_run
    assert re.search(rf"rows of {corpus.rows.objective.raw_length}\s+tokens", first_run)


def test_the_torch_for_older_drivers_has_the_tested_version():
    (version,) = re.findall(r"(?m)^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert f"pip install torch=={version}+cu126 " in page("how-to/install")


def test_the_commands_of_the_readme_fit_a_terminal():
    assert [line for line in README.splitlines() if line.startswith("    ") and len(line) > 78] == []


def test_the_milliseconds_of_the_readme_are_those_measured_on_one_gpu():
    """Of steps of T5 v1.1 base with 128 rows at once and compiled layers."""
    rows = [
        line["value"]
        for name in ("gpu-1", "gpu-2")
        for line in map(json.loads, (ROOT / f"docs/results/gpu/{name}.jsonl").read_text().splitlines())
        if line.get("row") in ("peers", "steps") and line["value"]["micro_batch"] == 128
    ]
    peers = {row["peer"]: row["ms"] for row in rows if row.get("compiled")}
    (ours,) = [row for row in rows if (row.get("run"), row.get("form")) == ("t5-v1.1-base-c4", "compiled")]
    assert f"[{ours['ms']:.0f} ms on one H200]" in README
    assert f"{100 * ours['mfu_of_data_sheet']:.0f} % MFU" in README
    nanot5, transformers = peers["nanoT5's form"], peers["transformers, sdpa"]
    assert f"takes {nanot5:.0f} ms and transformers' T5 {transformers:.0f} ms" in README


PUBLISHED = {"large": "large", "XL": "xl", "XXL": "xxl", "3B": "xl", "220M": "base"}  # the shapes of T5 v1.1


def test_the_mfu_of_published_runs_follows_from_their_rows():
    """An A100's peak is 312 TFLOP/s in bf16. NeMo's vocabulary has 29,184 ids, and its T5 the shapes of T5 v1.1's."""
    found = re.findall(r"^\| (t5x|NeMo), .*?(\w+)(?:, tensor .*)? \| (\d+) \| (\d+), (\d+) \| ([\d,]+) \| (\d+) % \|$",
                       page("reference/scaling"), re.MULTILINE)  # fmt: skip
    assert len(found) == 6
    for trainer, size, *numbers in found:
        gpus, inputs, targets, rows, mfu = (int(number.replace(",", "")) for number in numbers)
        shapes = yaml.safe_load((ROOT / f"configs/models/t5-v1.1-{PUBLISHED[size]}.yaml").read_text())["model"]
        overrides = [f"model.{key}={value}" for key, value in shapes.items()]
        overrides += ["model.vocab_size=29184"] * (trainer == "NeMo")
        config = load(ROOT / "configs/runs/t5-v1.1-base-c4.yaml", overrides, RunConfig)
        flops = count_flops(models.meta_model(config.model), Sizes.of_example(inputs, targets))
        assert round(100 * flops * rows / gpus / 312e12) == mfu, (trainer, size)


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
            assert re.search(r"hf download |https?://\S+|docs/\S+\.md|wikiextractor \S+", text), path.name


def files_of(name: str, folder: Path) -> dict[str, list[Path]]:
    """Writes the YAML files that a page shows into `folder`, and the shipped model that start/model.yaml stands for;
    returns the corpus files and the run files."""
    (folder / "start").mkdir()
    (folder / "start/model.yaml").write_bytes((ROOT / "configs/models/t5-v1.1-base.yaml").read_bytes())
    found: dict[str, list[Path]] = {"corpora": [], "runs": []}
    for file, content in re.findall(r"```yaml\n# ([\w.-]+\.yaml)[^\n]*\n(.*?)```", page(name), re.DOTALL):
        (folder / file).write_text(content)
        found["runs" if file.endswith(".run.yaml") else "corpora"].append(folder / file)
    return found


def named_corpora(run: RunConfig) -> set[str]:
    return {entry.corpus for entry in (*run.data.train, *run.data.validation)}


def test_the_run_files_of_continued_pretraining_train_on_corpora_that_the_page_builds(tmp_path):
    files = files_of("results/continue-pretraining", tmp_path)
    assert {kind: len(paths) for kind, paths in files.items()} == {"corpora": 2, "runs": 2}
    shipped = (ROOT / "configs/corpora").glob("*.yaml")
    corpora = {path: load(path, [], CorpusConfig) for path in (*files["corpora"], *shipped)}
    built = {corpus.output for corpus in corpora.values()}
    assert len({str(corpora[path].tokenizer) for path in files["corpora"]}) == 1
    for path in files["runs"]:
        run = load(path, [], RunConfig)
        assert named_corpora(run) <= built
        assert (run.optimizer.name, run.optimizer.learning_rate) == ("adafactor", 1e-3)


@each("imported", [False, True])
def test_the_run_file_of_a_task_fine_tunes_as_t5_does_from_a_run_or_an_import(imported, tmp_path):
    files = files_of("how-to/train-a-task", tmp_path)
    (corpus,), (run_file,) = files["corpora"], files["runs"]
    if imported:
        run_file.write_text(run_file.read_text().replace("base-c4.yaml]", "base-c4.yaml, start/model.yaml]"))
    run = load(run_file, ["checkpoint.init_from=start"] * imported, RunConfig)
    assert named_corpora(run) == {load(corpus, [], CorpusConfig).output}
    rates = {run.schedule.factor(step, 20_000, 1e-3) * run.optimizer.learning_rate for step in (0, 9_999, 19_999)}
    assert (run.optimizer.name, rates, run.model.dropout_rate) == ("adafactor", {1e-3}, 0.1)
    assert [hook.hook for hook in run.evaluation] == ["text_to_text"]


def test_the_table_of_models_to_continue_has_settings_that_fit():
    cell = r"`([^`]+)`"
    table = page("results/continue-pretraining").split("## Other models")[1]
    rows = re.findall(rf"(?m)^\| ([^`|]+) \| {cell} \| {cell} \| {cell} \| {cell} \|$", table)
    assert len(rows) == 6
    for model, tokenizer, objective, corpus_file, run_file in rows:
        settings = {
            "extends": [f"configs:{corpus_file}"],
            "tokenizer": yaml.safe_load(tokenizer),
            "rows": {"objective": yaml.safe_load(objective)},
        }
        corpus = load(settings, [], CorpusConfig)
        assert corpus.rows.objective.sentinels <= corpus.tokenizer.sentinels, model
        shapes = {"BART": "bart-base", "T5Gemma, T5Gemma 2": "t5gemma-b"}.get(model, "t5-v1.1-base")
        imported = models.parse(yaml.safe_load((ROOT / f"configs/models/{shapes}.yaml").read_text())["model"])
        run = load({"extends": [f"configs:{run_file}"], "model": imported.architecture()}, [], RunConfig)
        assert run.model.architecture() == imported.architecture(), model


def test_the_commands_that_download_text_do(tmp_path):
    """From a server of this machine, which has three WET files and three files of a dump."""
    crawl, dump = tmp_path / "crawl-data/CC-MAIN-2019-18", tmp_path / "enwiki/20240101"
    wet = [f"crawl-data/CC-MAIN-2019-18/{number}.warc.wet.gz" for number in range(3)]
    wanted = [f"enwiki-20240101-pages-articles-multistream{end}" for end in ("1.xml-p1p9.bz2", "-index1.txt-p1p9.bz2")]
    files = {**dict.fromkeys(wet, b"wet"), **{f"enwiki/20240101/{name}": name.encode() for name in [*wanted, "other"]}}
    for folder in (crawl, dump, tmp_path / "here/data"):
        folder.mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (crawl / "wet.paths.gz").write_bytes(gzip.compress("".join(f"{name}\n" for name in wet).encode()))
    sums = [f"{hashlib.sha1(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(dump.iterdir())]
    (dump / "enwiki-20240101-sha1sums.txt").write_text("".join(sums))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        commands = page("how-to/read-your-text").split("    # C4")[0].replace("head -100", "head -2")
        commands = re.sub(r"https://(data|dumps)\.\w+\.org", f"http://127.0.0.1:{server.server_port}", commands)
        commands = "\n".join(re.findall(r"(?m)^    (.*)", commands))
        done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path / "here", capture_output=True, text=True)
        server.shutdown()
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{name}: OK" for name in sorted(wanted)]), done.stderr
    assert {path.name for path in tmp_path.glob("here/data/crawl/**/*.gz")} == {Path(name).name for name in wet[:2]}


def test_the_picture_of_objectives_is_what_they_make_today():
    assert objectives.OUT.read_text() == objectives.svg()


def test_the_picture_of_a_plan_has_the_sizes_of_its_table():
    assert f"<dc:description>{plans.table()}</dc:description>" in (plans.FOLDER / "scaling.svg").read_text()


def test_the_pictures_of_loss_curves_are_of_the_data_beside_them():
    """And the page names no run that the data lack."""
    for picture in ("loss-curves.svg", "loss-curves-faults.svg"):
        described = f"<dc:description>{loss_curves.description()}</dc:description>"
        assert described in (loss_curves.FOLDER / picture).read_text(), ".venv/bin/python -m docs.pictures.loss_curves"
    found = loss_curves.curves(loss_curves.rows_of(loss_curves.DATA))
    assert found.keys() == {*loss_curves.NORMAL, *loss_curves.FAULTS}
    files = {path.stem for folder in ("configs/experiments/loss-curves", "benchmarks/loss_curves/faults")
             for path in (ROOT / folder).glob("*.yaml")}  # fmt: skip
    assert found.keys() == files - {"experiment"}


def test_curves_of_the_speedrun_add_up_the_seconds_between_two_lines(tmp_path, monkeypatch):
    runs = {0: [(25, 4.0, 6.0), (50, 2.0, 5.0)], 1: [(25, 6.0, 5.0), (50, 4.0, 4.0), (75, 1.0, 3.0)]}
    (tmp_path / "mini").mkdir()
    for seed, lines in runs.items():
        rows = [(step, {"train/processor_seconds": time, "train/loss": loss}) for step, time, loss in lines]
        rows.append((lines[-1][0], {"validation/text/loss": 2.0 + seed, "validation/text/text_loss": 9.0}))
        written = [{"step": step, "attempt": 1, "time": 0.0, "metrics": metrics} for step, metrics in rows]
        path = tmp_path / f"mini/baseline-seed-{seed}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in written))
    monkeypatch.setattr(speedrun, "RESULTS", tmp_path)
    logs = speedrun.curves_of(tmp_path / "mini", "baseline")
    curves = [speedrun.curve(log) for log in logs]
    assert curves[1] == [(25, 6.0, 5.0), (50, 10.0, 4.0), (75, 11.0, 3.0)]
    assert speedrun.mean(curves) == [(25, 5.0, 5.5), (50, 8.0, 4.5)]
    assert [speedrun.held_out(log) for log in logs] == [2.0, 3.0]
    assert speedrun.target("mini") == pytest.approx(2.5)
