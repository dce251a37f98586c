"""The tables of experiments: comparisons, BabyLM, speedruns, ladders and agreement with other systems."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from checks.results.data import ROOT, curves_of, number, p_value, power, rows_of, spread
from checks.results.tables import Tables, register
from data_pipeline.base.json_file import read_json
from experiments import speedrun
from experiments.ladder.compared import Other
from pretrain.models import meta_model, parse
from pretrain.tools.experiment import experiment_folder
from pretrain.tools.experiment.experiment_folder import Experiment, Group
from pretrain.tools.experiment.report import Line, lines
from pretrain.tools.experiment.results import Result, compare, ends_by_seed, holm, read_csv

TABLES: Tables = {}
table = partial(register, TABLES)


@cache
def _experiment(name: str) -> Experiment:
    return experiment_folder.read(ROOT / "configs/experiments" / name)


def _values(results: list[Result], row: str, name: str) -> list[float | None]:
    return [getattr(result, name) for result in results if result.row == row]


def _compared(name: str, path: Path, group: int = 0) -> Iterator[tuple[Line, list[str], list[Result]]]:
    """A group's rows with the cells `end`, Δ and p, p adjusted for all comparisons of the experiment's table."""
    experiment, results = _experiment(name), read_csv(path)
    for line in lines(experiment, results):
        chosen: Group = experiment.groups[group]
        if line.group == chosen:
            ends = list(ends_by_seed(results, line.row, chosen.metric).values())
            difference = number(line.comparison.difference, 3, sign=True) if line.comparison else ""
            cells = [spread(ends, 3), difference, p_value(line.adjusted_p)]
            yield line, cells, line.runs


@table("experiments-small")
def _experiments_small(folder: Path) -> Iterator[list[str]]:
    path, published = folder / "experiments/small.csv", dict[str, float]()
    for row in rows_of(folder / "experiments/published.csv"):
        published[row["row"]] = float(row["validation_loss"])
    for place, group in enumerate(_experiment("autoregressive-small").groups):
        yield [f"**{group.title}**", *[""] * 8]
        found = sorted(_compared("autoregressive-small", path, place), key=lambda one: not one[0].is_baseline)
        for line, (end, difference, p), runs in found:
            own, base = (published.get(row) for row in (line.row, group.baseline))
            rank, embedding_loss = (
                fmean(values) if (values := [run.others[name] for run in runs if name in run.others]) else None
                for name in ("effective_rank", "embedding_loss")
            )
            yield [
                f"`{line.row}`" + "*" * line.is_baseline,
                f"{runs[0].parameters:,}",
                spread([run.train_loss for run in runs], 3),
                end,
                power(embedding_loss) if embedding_loss else "",
                number(rank, 1),
                difference,
                p,
                number(own - base, 3, sign=True) if own and base and not line.is_baseline else "",
            ]


def _by_end(
    name: str, path: Path, group: int = 0, descending: bool = False
) -> list[tuple[str, list[str], list[Result]]]:
    found = [one for one in _compared(name, path, group) if one[0].compared]
    found.sort(key=lambda one: one[0].compared.mean, reverse=descending)
    return [(f"`{line.row}`", cells, runs) for line, cells, runs in found]


@table("comparison-rows")
def _comparison_rates(folder: Path) -> Iterator[list[str | None]]:
    by_row: dict[str, list[tuple[float, float]]] = {}
    for row in rows_of(folder / "comparison/rates.csv"):
        by_row.setdefault(row["row"], []).append((float(row["learning_rate"]), float(row["validation_loss"])))
    for row, tried in by_row.items():
        best = min(loss for _, loss in tried)
        yield [f"`{row}`", None, None, power(min(rate for rate, loss in tried if loss < best + 0.003), 0)]


@table("comparison-runs")
def _comparison_runs(folder: Path) -> Iterator[list[str]]:
    results = read_csv(folder / "comparison/runs.csv")
    for row in dict.fromkeys(result.row for result in results):
        runs = [result for result in results if result.row == row]
        tokens, seconds = (fmean(_values(results, row, name)) for name in ("tokens", "processor_seconds"))
        yield [
            f"`{row}`",
            f"{runs[0].parameters:,}",
            f"{runs[0].steps:,}",
            number(tokens / 1e6, 2),
            number(seconds, 0),
        ]


@table("comparison-blank")
def _comparison_blank(folder: Path) -> Iterator[list[str]]:
    for row, cells, _ in _by_end("comparison", folder / "comparison/runs.csv"):
        yield [row, *cells]


@table("comparison-second-half")
def _comparison_second_half(folder: Path) -> Iterator[list[str]]:
    for row, cells, _ in _by_end("comparison-prefix-lm", folder / "comparison/prefix-lm.csv"):
        yield [row, *cells]


@table("comparison-task")
def _comparison_task(folder: Path) -> Iterator[list[str]]:
    for row, cells, runs in _by_end("comparison-reversal", folder / "comparison/reversal.csv", descending=True):
        yield [row, *cells, number(fmean(run.processor_seconds or 0.0 for run in runs), 0)]


@table("bart-noises")
def _bart_noises(folder: Path) -> Iterator[list[str | None]]:
    for line, cells, _ in _compared("bart-noise", folder / "bart/noise.csv"):
        yield [f"`{line.row}`", None, *cells]


@table("bart-one-noise")
def _bart_one_noise(folder: Path) -> Iterator[list[str | None]]:
    for row, cells, _ in _by_end("bart-noise", folder / "bart/noise.csv", 1):
        if row != "`infilling`":
            yield [row, None, *cells]


@table("bart-enwik8")
def _bart_enwik8(folder: Path) -> Iterator[list[str | None]]:
    rows = rows_of(folder / "bart/enwik8.csv")
    steps = sorted({int(row["step"]) for row in rows})

    def over(value: Callable[[dict[str, str]], float]) -> list[str | None]:
        return [None, *(spread([value(row) for row in rows if int(row["step"]) == step], 2) for step in steps)]

    yield over(lambda row: float(row["text_loss"]))
    yield over(lambda row: float(row["input_worth"]))
    yield over(lambda row: float(row["infilling_loss"]))
    yield over(lambda row: float(row["infilling_other_context_loss"]) - float(row["infilling_loss"]))
    yield over(lambda row: float(row["infilling_bits_per_byte"]))


@table("babylm-runs")
def _babylm_runs(folder: Path) -> Iterator[list[str]]:
    for one in read_csv(folder / "babylm/runs.csv"):
        yield [
            str(one.seed),
            number(one.validation_loss, 3),
            number(one.text_loss, 3),
            number(one.input_worth, 2),
            number((one.processor_seconds or 0.0) / 60, 0),
        ]


@table("babylm-pairs")
def _babylm_pairs(folder: Path) -> Iterator[list[str]]:
    seeds = [read_json(folder / f"babylm/blimp-seed-{seed}.json", dict[str, Any]) for seed in (0, 1)]
    scores = ("word", "span", "official", "sentence", "no_input", "random", "unigram")
    for group in seeds[0]["word"]["by_group"]:
        cells = [number(100 * fmean(seed[score]["by_group"][group] for seed in seeds), 1) for score in scores]
        yield [group.replace("_", " "), *cells]
    for title, kind in (("groups", "by_group"), ("paradigms", "by_paradigm")):
        means = [[100 * fmean(seed[score][kind].values()) for seed in seeds] for score in scores]
        yield [f"**mean of {title}**", *(number(fmean(one), 1) for one in means)]
        yield ["seeds 0; 1", *("; ".join(number(value, 1) for value in one) for one in means)]


def _track(folder: Path, track: str, rows: tuple[str, str]) -> Iterator[list[str]]:
    """The two `rows` of a track as its judge has them."""
    results = [run for run in read_csv(folder / "speedrun" / track / "runs.csv") if run.row in rows]
    return speedrun.rows(speedrun.judged(speedrun.TRACKS[track], results))


@table("speedrun-mini")
def _speedrun_mini(folder: Path) -> Iterator[list[str]]:
    return _track(folder, "mini", ("narrow", "baseline"))


@table("speedrun-small")
def _speedrun_small(folder: Path) -> Iterator[list[str]]:
    return _track(folder, "small", ("narrow", "baseline-rms"))


@table("speedrun-mini-tuning")
def _speedrun_mini_tuning(folder: Path) -> Iterator[list[str]]:
    losses = {run.row: run.validation_loss for run in read_csv(folder / "speedrun/mini/tuning.csv")}
    for width, batch in ((128, 16), (128, 32), (96, 16), (96, 32)):
        found = [losses.get(f"width-{width}-batch-{batch}-rate-{rate}") for rate in ("0.75", "1.5", "3", "6")]
        yield [str(width), str(batch), *("" if loss is None else number(loss, 3) for loss in found)]


@table("speedrun-input-use")
def _input_use(folder: Path) -> Iterator[list[str | None]]:
    results = read_csv(folder / "speedrun/input-use/runs.csv")
    order = ["t5-adamw", "t5-muon", "t5-long-spans", "modern-long-spans", "t5gemma2-long-spans", "t5gemma2-muon"]
    order += ["t5gemma2-windows", "modern-windows-long-spans", "t5gemma2-windows-long-spans"]
    for row in order:
        curves = [dict(run["input_use/first_token_worth"]) for run in curves_of(folder / "speedrun/input-use", row)]
        worth = [[curve[step] for curve in curves] for step in (50, 100, 150, 200, 300, 400)]
        yield [
            None,
            number(fmean(_values(results, row, "processor_seconds")), 0),
            *(number(fmean(values), 2) for values in worth[:2]),
            *(spread(values, 2) for values in worth[2:]),
            spread(_values(results, row, "validation_loss"), 3),
            spread(_values(results, row, "text_loss"), 3),
        ]


@table("speedrun-ablations")
def _ablations(folder: Path) -> Iterator[list[str | None]]:
    """CPU seconds are of seeds 1 and 2: much of seed 0 was trained beside other work."""
    path, name = folder / "speedrun/ablations/runs.csv", "speedrun-mini"
    for place, group in enumerate(_experiment(name).groups):
        found = [one for one in _by_end(name, path, place) if not place or one[0] != f"`{group.baseline}`"]
        found.sort(key=lambda one: one[0] != f"`{group.baseline}`")
        if place and found:
            yield [f"**{group.title}**, Δ against `{group.baseline}`", *[""] * 6]
        for row, (end, difference, p), runs in found:
            seconds = [run.processor_seconds for run in runs if run.seed and run.processor_seconds]
            on_text = number(fmean(run.text_loss or 0.0 for run in runs), 3)
            yield [row, None, number(fmean(seconds), 1) if seconds else "", end, difference, on_text, p]


@table("speedrun-changes-in-code")
def _changes_in_code(folder: Path) -> Iterator[list[str | None]]:
    """Rows with two changes against their parents. One of the two is a row of the ablations, too."""
    own, ablations = (folder / f"speedrun/ablations/{name}.csv" for name in ("changes-in-code", "runs"))
    runs = rows_of(own) + [row for row in rows_of(ablations) if row["row"] == "modern-block"]
    names = dict.fromkeys(row["row"] for row in runs)
    losses = {
        name: {int(row["seed"]): float(row["validation_loss"]) for row in runs if row["row"] == name} for name in names
    }
    parents = {"average": "constant-rate", "squared-relu": "modern-block"}
    left_out = {*parents, "no-sentinel-loss", "modern-block"}
    found = compare({name: one for name, one in losses.items() if name not in left_out}, "long-spans")
    for name, parent in parents.items():
        found |= compare({parent: losses[parent], name: losses[name]}, parent)
    adjusted = dict(zip(found, holm([one.p or 0.0 for one in found.values()]), strict=True))
    for name in sorted(names, key=lambda name: fmean(losses[name].values())):
        if name == "modern-block":
            continue
        text, first = (
            fmean(float(row[key]) for row in runs if row["row"] == name) for key in ("text_loss", "first_token_worth")
        )
        difference = number(found[name].difference, 3, sign=True) if name in found else ""
        end, p = spread([*losses[name].values()], 3), p_value(adjusted.get(name))
        yield [f"`{name}`", None, end, difference, number(text, 3), number(first, 2), p]


@table("speedrun-factors")
def _factors(folder: Path) -> Iterator[list[str]]:
    """The textbook's law, with the spread of `narrow`'s seeds in the place of its one degree of freedom."""
    runs = [run for row in ("narrow", "narrow-busier") for run in curves_of(folder / "speedrun/small", row)]
    seeds = [run["validation/loss"][-1][1] for run in runs]
    other = Other.read(folder / "speedrun/ladders/enwik8-textbook.json")
    law = replace(other.law, residual=stdev(seeds), degrees=len(seeds) - 1)
    for rung in read_json(folder / "speedrun/ladders/enwik8-record.json", dict[str, Any])["rungs"]:
        (loss,) = rung["losses"].values()
        best, least, most = replace(other, law=law).factor(rung["flops"], loss)
        interval = f"{least:.1f} to {most:.1f}" if math.isfinite(most) else f"{least:.1f} or more"
        yield [rung["name"][1:], number(loss, 3), number(best, 0 if best >= 10 else 1), interval]


@table("speedrun-ladders")
def _ladders(folder: Path) -> Iterator[list[str | None]]:
    files = [folder / f"speedrun/ladders/enwik8-{name}.json" for name in ("textbook", "record")]
    ladders = [read_json(file, dict[str, Any]) for file in files]
    for rungs in zip(*(ladder["rungs"] for ladder in ladders), strict=True):
        for first, rung in zip((True, False), rungs, strict=True):
            parameters, loss = f"{rung['parameters'] / 1e6:.2f} M", spread([*rung["losses"].values()], 3)
            cells = [parameters, f"{rung['steps']:,}", power(rung["flops"]), loss]
            yield [rung["name"][1:] if first else "", None, *cells]


_TEXTBOOK = ["loss", "other_input_loss", "unigram_entropy", "bigram_entropy", "first_token_loss", "first_token_worth"]
_TEXTBOOK += ["later_token_loss", "later_token_worth"]


@table("textbook")
def _textbook(folder: Path) -> Iterator[list[str | None]]:
    (run,) = curves_of(folder / "speedrun/mini", "textbook")
    end = {name: run[f"input_use/{name}"][-1][1] for name in _TEXTBOOK}
    yield [None, *(number(end[name], 3) for name in _TEXTBOOK[:4])]
    for loss, worth in (_TEXTBOOK[4:6], _TEXTBOOK[6:]):
        yield [None, number(end[loss], 3), number(end[loss] + end[worth], 3), "", ""]


@table("models-agreement")
def _agreement(folder: Path) -> Iterator[list[str]]:
    for row in rows_of(folder / "models/agreement.csv"):
        pairs = [
            f"{float(row[f'{name}_differ']):.0e} of {float(row[f'largest_{name[:-1]}']):.2g}"
            for name in ("logits", "gradients")
        ]
        yield [row["family"], row["against"], *pairs, f"{row['equal_rows']} of {row['rows']}"]


@table("models-parameters")
def _parameters(folder: Path) -> Iterator[list[str]]:
    """Of the models of configs/models and of examples, beside the counts of others in models/others.csv."""
    for row in rows_of(folder / "models/others.csv"):
        file, _, without = row["config"].partition(", without ")
        folders = "configs/models", "examples/*/configs"
        path = next(path for folder in folders for path in ROOT.glob(f"{folder}/{file}.yaml"))
        values = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        parameters = meta_model(parse(values)).named_parameters()
        own = sum(one.numel() for name, one in parameters if without != "positions" or "position" not in name)
        others = int(row["by_others"] or 0)
        equal = "—" if not others else "yes" if own == others else "no"
        yield [row["config"], f"{own:,}", f"{others:,}" if others else "—", equal]
