"""Run files that are wrong, and runs that are refused because of the rows that they get or the machine they are on."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from data_pipeline.base.atomic import write_json
from data_pipeline.base.config_file import load, merged
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.index import newest
from pretrain.models import FAMILIES
from pretrain.run.world import World
from pretrain.training import preflight as module
from pretrain.training.preflight import device_problems
from pretrain.training.prepare import prepare
from tests.support.runs import run_file
from tests.support.small_runs import run_config
from tests.support.tables import each

SIZES = {"d_model": 32, "d_ff": 64, "num_heads": 4}
DECODER = {**SIZES, "family": "decoder_only", "num_layers": 1, "positions": "rotary"}
ENCODER = {**SIZES, "family": "encoder_only", "num_layers": 1}
VANILLA = {**SIZES, "family": "vanilla", "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.fixture
def prepared(small_corpus, tmp_path):
    """prepared(model, objective, sections, key=…): the setup of a run.

    `objective` replaces the corpus's span corruption; its length is counted from that of the corpus's texts. `sections`
    replace sections, and keys are those of the optimizer.
    """
    raw_length = open_corpus(small_corpus).manifest.rows.raw_length

    def made(model, objective=None, sections=None, **optimizer):
        corpora = [{"corpus": str(small_corpus)}]
        objective = objective and {**objective, "length": raw_length + objective["length"]}
        usual = {
            "run": {"name": "a", "directory": str(tmp_path / "run"), "max_steps": 1},
            "data": {"train": corpora, "validation": corpora, "objective": objective},
            "optimizer": {"learning_rate": 1e-3, **optimizer},
        }
        return prepare(run_config(model=model, **(usual | (sections or {}))), World.on_this_node())

    return made


RENAMED = [
    ("data", "pack", "packing_ratio"),
    ("data", "prefetch", "prefetch_factor"),
    ("faults", "hang_seconds", "hang_timeout_seconds"),
    ("faults", "restarts", "max_restarts"),
    ("faults", "start_seconds", "start_timeout_seconds"),
]


@each("section, old, new", RENAMED)
def test_an_earlier_name_of_a_key_is_taken_in_files_and_overrides(section, old, new, tmp_path, monkeypatch, capsys):
    """Whichever comes later decides, under whichever name: a file, the file that extends it, or an override."""
    monkeypatch.delenv("RANK", raising=False)
    usual = run_config().model_dump(mode="json", exclude_unset=True)

    def file(name: str, keys: dict[str, int], **more: object) -> Path:
        (tmp_path / name).write_text(yaml.safe_dump({**usual, section: {**usual.get(section, {}), **keys}, **more}))
        return tmp_path / name

    first, same, earlier = file("1.yaml", {new: 1}), file("3.yaml", {new: 3}), file("old.yaml", {old: 3})
    expected = load(same, [], RunConfig)
    assert (getattr(getattr(expected, section), new), capsys.readouterr().err) == (3, "")
    assert [load(earlier, [], RunConfig) for _ in range(2)] == [expected, expected]
    assert capsys.readouterr().err == f"warning: {earlier}: {section}.{old} is called {section}.{new} now\n"
    assert load(first, [f"{section}.{old}=3"], RunConfig) == expected
    assert load(first, [f"{section}={{{old}: 3}}"], RunConfig) == expected
    assert load(file("last.yaml", {old: 3}, extends="1.yaml"), [], RunConfig) == expected
    both = [f"{section}.{old}=2", f"{section}.{new}=3"]
    assert load(file("today.yaml", {new: 2}, extends="old.yaml"), both, RunConfig) == expected
    (tmp_path / "merged.yaml").write_text(merged(first, [f"{section}.{old}=3"], RunConfig))
    assert load(tmp_path / "merged.yaml", [], RunConfig) == expected


def test_the_earlier_name_of_a_value_is_taken_and_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_config().model_dump(mode="json", exclude_unset=True)))
    for _ in range(2):
        assert load(path, ["checkpoint.on_failure=go_on"], RunConfig).checkpoint.on_failure == "continue"
    assert capsys.readouterr().err == "warning: checkpoint.on_failure: go_on is called continue now\n"


def test_a_key_under_both_of_its_names_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {pack: 2, packing_ratio: 3}")
    with pytest.raises(
        UserError, match=r"run.yaml: data.pack: is called packing_ratio now, which is given, too; leave"
    ):
        load(tmp_path / "run.yaml", [], RunConfig)


def told(prepared, *arguments, **more):
    """What a refused setup is told, a line for each problem."""
    with pytest.raises(UserError) as refused:
        prepared(*arguments, **more)
    return str(refused.value).splitlines()


CAUSAL, MASKED = {"name": "causal_lm", "length": -1}, {"name": "masked_lm", "length": 2}
OF_DECODERS = "causal_lm, causal_infilling, in_one_row"
T5GEMMA = {"family": "t5gemma2", **SIZES, "num_layers": 1}


@each(
    "model, objective, expected",
    [
        (DECODER, None, f"model.family: decoder_only learns from {OF_DECODERS}, but .* has span_corruption"),
        (DECODER, MASKED, f"decoder_only learns from {OF_DECODERS}, but .*/corpus has masked_lm"),
        (ENCODER, CAUSAL, "encoder_only learns from masked_lm, but .*/corpus has causal_lm"),
        (VANILLA, CAUSAL, "vanilla learns from span_corruption, .*text_to_text, but .*/corpus has causal_lm"),
        ({**T5GEMMA, "bos_id": 2}, None, "bos_id: 2, but .*/corpus's tokenizer has 1"),
    ],
)
def test_a_family_takes_rows_of_its_kind_alone(prepared, model, objective, expected):
    assert re.search(expected, "\n".join(told(prepared, model, objective)))


def test_a_model_takes_rows_of_its_kind(prepared):
    assert prepared(DECODER, CAUSAL).model.family == "decoder_only"
    assert prepared(VANILLA).model.family == "vanilla"
    # transformers doesn't show padding to T5Gemma's decoder; checkpoints of runs that started from it say so
    starts = [prepared({**T5GEMMA, **given}).model.bos_id for given in ({}, {"bos_id": 1}, {"bos_id": None})]
    assert starts == [1, 1, None]


def test_all_problems_are_told_at_once(prepared, small_corpus):
    """The corpus has no mask token, a different vocabulary, and rows too long for the positions."""
    length = open_corpus(small_corpus).manifest.rows.raw_length + 1
    model = {**ENCODER, "max_positions": length, "vocab_size": 100}
    lines = told(prepared, model, MASKED)
    for expected in ("no mask token", "model.vocab_size: 100", f"takes sequences of {length} tokens at most"):
        assert len([line for line in lines if expected in line]) == 1
    assert len(lines) == 3
    lines = told(prepared, DECODER, groups=[{"match": ["norm"], "weight_decay": 0.0}])
    assert len(lines) == 2  # the objective doesn't fit either
    assert any("optimizer.groups.0.match.0: 'norm' matches no remaining parameter" in line for line in lines)


def test_objectives_and_micro_batches_fit_the_rows(prepared, small_corpus):
    longer, causal = {"name": "span_corruption", "inputs_length": 64}, {"name": "causal_lm", "length": 33}
    train = [{"corpus": str(small_corpus)}]
    for data, expected in (
        ({"objective": longer}, "data.objective: needs rows of"),
        ({"curriculum": [{"until_step": 4, "objective": longer}]}, "data.curriculum.0.objective: needs rows of"),
        ({"curriculum": [{"until_step": 4, "objective": causal}]}, "model.family: vanilla learns from"),
    ):
        (line,) = told(prepared, VANILLA, sections={"data": {"train": train, **data}})
        assert line.startswith(expected)
    rows = open_corpus(small_corpus).manifest.rows.raw_length
    in_one_row = {"name": "in_one_row", "of": {"name": "span_corruption", "noise_density": 0.5}}
    others = [(VANILLA, {"name": name}) for name in ("prefix_lm", "full_lm", "iid_denoising", "span_corruption")]
    for model, objective in (*others, (DECODER, in_one_row)):
        (line,) = told(prepared, model, sections={"data": {"train": train, "objective": objective}})
        fitting = yaml.safe_load(line.partition("; with data.objective='")[2].partition("' it fits")[0])
        prepared(model, sections={"data": {"train": train, "objective": fitting}})  # isn't refused
    (line,) = told(prepared, VANILLA, sections={"data": {"train": train, "objective": {"name": "ul2"}}})
    assert line.endswith(
        f"but {small_corpus} has rows of {rows}; build rows for it: data-pipeline build the corpus file with "
        "rows.objective=null rows.objective='{name: ul2}' and another `output`"
    )
    pairs = {"name": "text_to_text", "inputs_length": rows}
    for given, name in ((pairs, "text_to_text"), ({"name": "in_one_row", "of": pairs}, "in_one_row of text_to_text")):
        assert told(prepared, VANILLA, sections={"data": {"train": train, "objective": given}})[0] == (
            f"data.objective: {name} needs rows.packing complete_documents or examples, but {small_corpus} was built "
            "with concatenate"
        )
    sections = {"batch": {"global_batch_size": 8, "micro_batch_size": 3}}
    assert told(prepared, VANILLA, sections=sections) == [
        "batch.micro_batch_size: 3 doesn't divide a rank's share of 8 rows"
    ]


DENSE = {"name": "span_corruption", "inputs_length": 64, "noise_density": 0.6}
"""No value of `inputs_length` gives rows of 34 tokens."""
TWO = {"name": "ul2", "denoisers": [{"denoiser": {"name": "span_corruption", "inputs_length": n}} for n in (24, 48)]}


@each(
    "model, objective, own",
    [
        (DECODER, {"name": "in_one_row", "of": DENSE}, {"name": "span_corruption", "mean_span_length": 9.0}),
        (VANILLA, {"name": "ul2"}, TWO),
        (VANILLA, TWO, {"name": "ul2"}),
    ],
)
def test_the_advice_for_a_corpus_file_gives_the_rows_that_the_objective_needs(
    prepared, small_corpus, tmp_path, model, objective, own
):
    """Keys of `own`, the objective of the corpus file, don't stay."""
    data = {"train": [{"corpus": str(small_corpus)}], "objective": objective}
    (line,) = told(prepared, model, sections={"data": data})
    overrides = shlex.split(line.partition("build the corpus file with ")[2].partition(" and another")[0])
    file = {"name": "a", "output": "a", "sources": [{"format": "text", "path": "a"}], "rows": {"objective": own}}
    (tmp_path / "corpus.yaml").write_text(yaml.safe_dump(file))
    rows = load(tmp_path / "corpus.yaml", overrides, CorpusConfig).rows
    assert f"needs rows of {rows.objective.raw_length} tokens" in line
    assert rows.objective == run_config(model=model, data=data).data.objective.as_cut


def test_the_shares_of_corpora_of_one_name_are_told_apart(prepared, small_corpus, corpus_built_with_noise):
    """Both are called "small"."""
    train = [{"corpus": str(small_corpus), "weight": 3.0}, {"corpus": str(corpus_built_with_noise), "weight": 1.0}]
    assert prepared(VANILLA, sections={"data": {"train": train}}).shares == [("small", 0.75), ("small", 0.25)]


@pytest.mark.slow
def test_the_ids_of_a_model_are_the_tokenizers(prepared, small_corpus, bart_corpus):
    """In BART's vocabulary, padding, from which the decoder starts, is 1, and EOS is 2."""
    corpora = [{"corpus": str(bart_corpus)}]
    model = prepared(VANILLA, sections={"data": {"train": corpora}}).model
    assert (model.vocab_size, model.pad_id, model.eos_id) == (50_286, 1, 2)
    (line,) = told(prepared, {**VANILLA, "pad_id": 0}, sections={"data": {"train": corpora}})
    assert line == f"model.pad_id: 0, but {bart_corpus}'s tokenizer has 1"
    corpora = [{"corpus": str(small_corpus)}, *corpora]
    (line,) = told(prepared, VANILLA, sections={"data": {"train": corpora}})
    assert line.startswith(f"{bart_corpus}: built with another tokenizer than {small_corpus}")


def test_a_corpus_is_named_once_in_training_and_once_held_out(prepared, small_corpus, tmp_path):
    """A corpus listed twice in training would give the same rows at the same time. A copy is the same corpus. A remote
    one has its URL in messages, not the name that its copy has in the cache."""
    copy = tmp_path / "copy"
    shutil.copytree(small_corpus, copy)
    for place in (str(copy), copy.as_uri()):
        twice = [{"corpus": str(small_corpus)}, {"corpus": place, "name": "other"}]
        train = [{"corpus": entry["corpus"]} for entry in twice]
        data = {"train": train, "validation": twice, "cache": {"directory": str(tmp_path / "cache")}}
        assert told(prepared, VANILLA, sections={"data": data}) == [
            f"data.train.1: {place} is the same corpus as data.train.0; leave one out",
            f"data.validation.1: {place} is the same corpus as data.validation.0; leave one out",
        ]


def test_held_out_corpora_of_one_name_need_another(prepared, small_corpus, corpus_built_with_noise):
    """Both are called "small", and their metrics would overwrite each other."""
    entries = [{"corpus": str(small_corpus)}, {"corpus": str(corpus_built_with_noise)}]
    data = {"train": entries[:1], "validation": entries}
    with pytest.raises(UserError, match=r"data\.validation\.1: named 'small' like data\.validation\.0; .*1\.name"):
        prepared(VANILLA, sections={"data": data})
    entries[1]["name"] = "built"
    assert list(prepared(VANILLA, sections={"data": data}).validation) == ["small", "built"]


def test_a_corpus_is_held_out_with_several_objectives_under_several_names(prepared, small_corpus):
    corpus = {"corpus": str(small_corpus)}
    length = open_corpus(small_corpus).objective.raw_length
    entries = [corpus, {**corpus, "objective": {"name": "prefix_lm", "length": length}}]
    data = {"train": [corpus], "validation": entries}
    (line,) = told(prepared, VANILLA, sections={"data": data})
    assert line.startswith("data.validation.1: named 'small' like data.validation.0; set another name")
    entries[1]["name"] = "rest"
    held_out = prepared(VANILLA, sections={"data": data}).validation
    assert {name: one.objective.name for name, one in held_out.items()} == {
        "small": "span_corruption",
        "rest": "prefix_lm",
    }


def test_a_batch_larger_than_its_corpus_is_warned_of(prepared, small_corpus):
    rows = open_corpus(small_corpus).rows("train")
    none, (warning,) = (
        prepared(VANILLA, sections={"batch": {"global_batch_size": size}}).warnings for size in (rows, rows + 1)
    )
    assert none == []
    assert f"data.train.0: {small_corpus} has {rows} rows, but a step takes {rows + 1}" in warning


def test_a_ramp_up_whose_batches_allow_only_small_micro_batches_is_warned_of(prepared):
    def warned(smaller, micro_batch_size=None):
        ramp = [{"until_step": 1, "global_batch_size": smaller}]
        batch = {"global_batch_size": 64, "micro_batch_size": micro_batch_size, "ramp_up": ramp}
        return prepared(VANILLA, sections={"batch": batch}).warnings

    (warning,) = warned(20)
    assert "batch.ramp_up: no micro-batch has more than 4 rows" in warning
    assert "multiples of 20 it is 20" in warning
    assert warned(20, "auto") == [warning]
    assert warned(32) == warned(20, 4) == []


@each(
    "schedule, warned",
    [
        ({"warmup_steps": 20}, True),
        ({"warmup_steps": 19}, False),
        ({"name": "inverse_square_root", "warmup": "linear", "warmup_steps": 100}, True),
        ({"name": "inverse_square_root", "warmup": "constant", "warmup_steps": 100}, False),  # its rate doesn't rise
    ],
)
def test_a_run_that_ends_inside_its_warm_up_is_warned_of(prepared, tmp_path, schedule, warned):
    run = {"name": "a", "directory": str(tmp_path / "run"), "max_steps": 20}
    found = prepared(VANILLA, sections={"run": run, "schedule": schedule}).warnings
    assert [line.partition(":")[0] for line in found] == ["schedule.warmup_steps"] * warned
    assert all("run.max_steps is 20, so the run ends inside its warm-up" in line for line in found)


def test_a_prefix_that_no_row_has_is_warned_of(prepared):
    prefix = {**DECODER, "prefix_attention": "bidirectional"}
    (warning,) = prepared(prefix, CAUSAL).warnings
    assert warning.startswith("model.prefix_attention: bidirectional, but only rows of the objective in_one_row")
    assert prepared(DECODER, CAUSAL).warnings == []


def test_a_corpus_without_a_row_in_the_run_is_warned_of(prepared, small_corpus, corpus_built_with_noise):
    """Of 8 rows, a weight of 1e-7 has none; it isn't refused, since a longer run has its rows."""
    train = [{"corpus": str(small_corpus)}, {"corpus": str(corpus_built_with_noise), "weight": 1e-7}]
    (warning,) = prepared(VANILLA, sections={"data": {"train": train}}).warnings
    assert "data.train.1: " in warning
    assert "none of its rows is among the 8 rows of this run" in warning


def test_weights_count_rows_and_a_run_file_in_which_they_counted_tokens_is_refused(small_corpus, tmp_path):
    """Run files of earlier versions name `rows`."""
    train = [{"corpus": str(small_corpus)}]
    data = {"train": train, "validation": train}
    config = load(run_file(tmp_path / "rows", small_corpus, data={**data, "weights_of": "rows"}), [], RunConfig)
    assert "weights_of" not in config.data.model_dump()
    path = run_file(tmp_path / "tokens", small_corpus, data={**data, "weights_of": "tokens"})
    with pytest.raises(
        UserError, match=r"data\.weights_of: gone; weights are shares of the rows: divide a share of the "
    ):
        load(path, [], RunConfig)


@each(
    "section, ignored, refused, said",
    [
        ("run", {"bind_cores": True}, {"bind_cores": False}, "a rank is bound to cores that `taskset` leaves to it"),
        ("compute", {"kernel_cache": None}, {"kernel_cache": "/x"}, "set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR"),
        (
            "optimizer",
            {"name": "adafactor", "learning_rate": 0.01, "decay_rate": 0.8, "eps": [1e-30, 1e-3]},
            {"name": "adafactor", "learning_rate": 0.01, "clipping_threshold": 2.0},
            "leave it out: it is the paper's constant, 1.0",
        ),
    ],
)
def test_a_key_that_is_gone_is_ignored_with_its_default_and_refused_with_the_way_out(
    small_corpus, tmp_path, section, ignored, refused, said
):
    load(run_file(tmp_path / "a", small_corpus, **{section: ignored}), [], RunConfig)
    with pytest.raises(UserError, match=rf"{section}\.\w+: gone; .*{said}"):
        load(run_file(tmp_path / "b", small_corpus, **{section: refused}), [], RunConfig)


@each("key, value", [("size", 500), ("sentinels", 19), ("eos", 2)])
def test_a_manifest_that_describes_another_tokenizer_is_refused(prepared, small_corpus, tmp_path, key, value):
    """The ids in its rows would be outside the model's vocabulary, or have another meaning."""
    copy = tmp_path / "copy"
    shutil.copytree(small_corpus, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tokenizer"][key] = value
    del manifest["sha256"]
    write_json(copy / "manifest.json", manifest, sealed=True)
    with pytest.raises(FailedError, match=rf"{copy}: tokenizer\.(size|eos) is described as \d+; .* has \d+"):
        prepared(VANILLA, sections={"data": {"train": [{"corpus": str(copy)}]}})


def test_a_run_is_resumed_without_the_checkpoint_that_its_weights_came_from(whole, tmp_path):
    """That run's only checkpoint has lost its files since."""
    (tmp_path / "source/checkpoints/step-00000001").mkdir(parents=True)
    config = load(whole / "adamw/run.yaml", [f"checkpoint.init_from={tmp_path / 'source'}"], RunConfig)
    with pytest.raises(UserError, match=r"^checkpoint\.init_from: "):
        prepare(config, World.on_this_node())
    run = prepare(config, World.on_this_node(), newest(whole / "adamw/run"))
    assert (run.train_state.step, run.initial_weights) == (12, None)


# What the machine can't do


@pytest.fixture
def problems(monkeypatch, tmp_path):
    """problems(config, gpus=…, …): those of a machine whose CUDA is in `tmp_path` and has no compiler yet."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    def found(config, gpus=1, usable=True, bf16=True, asynchronous=True):
        monkeypatch.setattr(module, "count_gpus", lambda: gpus)
        monkeypatch.setattr("pretrain.engine.deepspeed_private.can_build_async_io", lambda: asynchronous)
        answers = {"is_available": usable, "is_bf16_supported": bf16, "get_device_name": "Tesla V100"}
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda answer=answer, **options: answer)
        return device_problems(config)

    return found


NVME = run_config(3, zero={"offload_param": {"device": "nvme", "nvme_path": "/nvme"}})
QUANTIZED = run_config(3, zero={"zero_quantized_weights": True})
KEY = "deepspeed.zero_optimization.zero_quantized_weights"
UNUSABLE = f"this machine has GPUs, but PyTorch {torch.__version__} can't use them; it was built "


@each(
    "config, machine, expected",
    [
        (run_config(precision="bf16"), {"bf16": False}, ["precision: Tesla V100 has no bf16; set fp32"]),
        (run_config(precision="fp32"), {"bf16": False}, []),
        (NVME, {"asynchronous": False}, ["deepspeed.zero_optimization.offload_param.device: nvme needs DeepSpeed's"]),
        (NVME, {}, []),
        (run_config(compute={"attention": "triton"}), {"gpus": 0}, ["compute.attention: triton needs a GPU; set auto"]),
        (
            run_config(compute={"compile": True}),
            {"gpus": 0},
            ["compute.compile: on a CPU it needs a C++ compiler, and g++"],
        ),
        (run_config(compute={"compile": True}), {}, []),
        (QUANTIZED, {"gpus": 0}, [f"{KEY}: DeepSpeed's quantizer needs a GPU"]),
        (QUANTIZED, {}, [f"{KEY}: DeepSpeed compiles its quantizer at the start, but there is no nvcc"]),
        # it would otherwise train on the CPU, as many ranks as there are GPUs, and not say so
        (run_config(), {"gpus": 8, "usable": False}, [UNUSABLE]),
    ],
)
def test_what_a_machine_cannot_do_is_refused(problems, config, machine, expected):
    found = problems(config, **machine)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))


def test_a_pytorch_for_a_newer_driver_names_the_one_for_an_older(problems, monkeypatch):
    version = torch.__version__.partition("+")[0]
    install = f"pip install torch=={version}+cu126 --index-url https://download.pytorch.org/whl/cu126"
    for cuda, said in (("13.0", True), ("12.6", False), (None, False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        (line,) = problems(run_config(), gpus=8, usable=False)
        assert (f"CUDA 13 needs NVIDIA's driver R580 or newer; for an older driver {install}; " in line) == said


def test_no_shipped_run_needs_nvcc_and_quantized_weights_do(problems, tmp_path):
    runs = list((Path(__file__).parents[3] / "configs/runs").glob("*.yaml"))
    assert runs
    assert [problems(load(path, [], RunConfig)) for path in runs] == [[]] * len(runs)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert problems(QUANTIZED) == []


# Run files


@pytest.fixture
def config(tmp_path):
    path = run_file(tmp_path, Path("none"))
    return lambda *overrides: load(path, overrides, RunConfig)


def test_a_key_of_a_family_is_named_as_in_the_file(config):
    """The suggested key is of the same family: T5 has no cross_attention_bias."""
    with pytest.raises(UserError, match=r"model\.num_head: unknown key; nearest valid key: model\.num_heads$"):
        config("model.num_head=3")
    with pytest.raises(UserError, match=r"model\.cross_attention_bias: unknown key") as error:
        config("model.cross_attention_bias=true")
    assert "nearest valid key: model.cross" not in str(error.value)


@each(
    "override, line",
    [
        ("model.d_ff=0", "model.d_ff: expected integer > 0, ≤ 1,048,576, got 0 (width of the feed-forward layers)"),
        (
            "batch.micro_batch_size=x",  # one line, not one for each type that it may have
            "batch.micro_batch_size: expected integer > 0, auto or null, got 'x' (rows per forward pass on a rank)",
        ),
        (
            "deepspeed.train_batch_size=4",
            "deepspeed.train_batch_size: set batch instead",
        ),
        ("data.train=[]", "data.train: expected non-empty list of keys and values, got [] (the corpora to train on)"),
        ("faults.spikes=7", "faults.spikes: expected keys and values or null, got 7 (detection of loss spikes)"),
        (
            "optimizer.name=sgd",
            "optimizer.name: expected one of adamw, adamw_scale, adafactor, muon, lion, got 'sgd'; no installed "
            "package offers 'sgd' (entry point encdec_pretrain.optimizers)",
        ),
        ("data.objective={length: 3}", "data.objective.name: missing"),
        ("evaluation=[{every_steps: 5}]", "evaluation.0.hook: missing"),
        (
            "data.objective={name: ul2, mode_tokens: {Q: '[Q]'}}",
            "data.objective.mode_tokens.Q: input should be 'R', 'S' or 'X', got 'Q' "
            "(the special token before the inputs for each mode; tokenizer.special_tokens must list them)",
        ),
    ],
)
def test_a_wrong_value_has_one_line_with_what_is_expected_and_what_the_key_means(config, override, line):
    with pytest.raises(UserError) as error:
        config(override)
    (found,) = str(error.value).splitlines()
    assert found.partition("run.yaml: ")[2] == line


# Overrides by what is expected instead.
TOO_MUCH = {
    "≤ 1,000,000,000": [
        *(
            "run.max_steps=10000000000",
            "checkpoint.every_steps=10000000000",
            "faults.hang_timeout_seconds=1e30",
            "faults.start_timeout_seconds=1e30",
        ),
        *("faults.dead_rank_seconds=1e30", "data.cache.gigabytes=1e30"),
    ],
    "≤ 1,048,576": ["batch.global_batch_size=2147483648", "data.lanes=10000000000", "model.d_model=2147483648"],
    "≤ 65,536": ["faults.spikes.window=10000000000"],
    "≤ 1,024": [
        *("model.num_encoder_layers=10000000000", "data.workers=1000000", "data.prefetch_factor=1000000"),
        "run.cpu_threads=1000000",
    ],
    "from -2**63 to 2**63 - 1": [f"run.seed={2**70}", f"checkpoint.keep_last={2**63}"],
    "as fp32 has them": [
        *("optimizer.learning_rate=1e39", "optimizer.eps=1e-39", "model.init_output_std=1e39"),
        "model.layer_norm_epsilon=1e-39",
    ],
}


@each("override, bound", [(override, bound) for bound, overrides in TOO_MUCH.items() for override in overrides])
def test_a_number_that_no_machine_works_with_is_refused_before_anything_begins(config, override, bound):
    with pytest.raises(UserError) as error:
        config(override)
    (found,) = str(error.value).splitlines()
    assert found.partition("run.yaml: ")[2].startswith(f"{override.partition('=')[0]}: expected ")
    assert bound in found


def test_shipped_runs_for_gpus_choose_their_micro_batch():
    """Runs in bf16 that fix no number of a CPU's threads are for GPUs, and what fits differs between them."""
    files = [*Path("configs/runs").glob("*.yaml"), *Path("configs/speedrun/gpu").glob("*.yaml")]
    runs = [load(path, [], RunConfig) for path in files if path.name != "experiment.yaml"]
    chosen = [run.batch.micro_batch_size for run in runs if run.precision == "bf16" and not run.run.cpu_threads]
    assert chosen == ["auto"] * 18


def test_every_shipped_run_file_is_valid_and_fits_its_corpus_file():
    """The kind and length of rows and the tokenizer's ids fit, as far as the corpus file determines them."""
    corpora = {}
    for path in Path("configs/corpora").glob("*.yaml"):
        corpus = load(path, [], CorpusConfig)
        corpora[corpus.output] = corpus
    files = sorted([*Path("configs/runs").glob("*.yaml"), *Path("configs/speedrun/gpu").glob("*.yaml")])
    assert files
    for path in files:
        if path.name == "experiment.yaml":
            continue
        run = load(path, [], RunConfig)
        model, held_out = run.model, {}
        for entry in run.data.validation:
            corpus = corpora[entry.corpus]
            objective = run.data.held_out_objective(entry) or corpus.rows.objective
            held_out[entry.name or corpus.name] = objective.full_name
        assert [problem for hook in run.evaluation for problem in hook.problems(held_out)] == [], path
        for entry in run.data.train:
            corpus = corpora[entry.corpus]
            objective, tokenizer = corpus.rows.objective, corpus.tokenizer
            assert objective.name in FAMILIES[model.family].objectives, path
            assert model.longest_sequence is None or model.longest_sequence >= max(objective.shape), path
            if tokenizer.kind == "sentencepiece" and model.vocab_size is not None:
                ids = tokenizer.vocab_size + len(tokenizer.special_tokens) + tokenizer.sentinels
                assert (model.vocab_size, model.pad_id, model.eos_id) == (ids, 0, 1), path
