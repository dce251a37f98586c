"""Runs that learn from a teacher: what it says of each target, the loss of a step, resuming, and what is refused."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from distillation.wrapper import Distillation

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.example_rows import balanced
from data_pipeline.corpus.objectives.language_modelling import PrefixLM
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import as_batch
from pretrain import models
from pretrain.config.run_config import RunConfig
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.tensors import StoredTensors
from pretrain.engine.checkpoint.trained import save_weights
from pretrain.models import parse
from pretrain.models.model import Model
from pretrain.run.metrics_file import read_metrics
from pretrain.run.world import World
from pretrain.training.callback import Metrics
from pretrain.training.prepare import prepare
from tests.support.example_rows import PAD, VOCABULARY, ragged_rows
from tests.support.exported import randomise
from tests.support.rank_processes import on_ranks
from tests.support.runs import MODEL, losses, run_file, train_each
from tests.support.small_runs import own_sharding, run_config
from tests.support.tables import each

DECODER = {"family": "decoder_only", "d_model": 24, "d_ff": 48, "num_heads": 4, "num_layers": 1, "init_std": 0.3}
ROTARY = {**DECODER, "positions": "rotary"}


def random_teacher(**changes) -> Model:
    torch.manual_seed(1)
    return models.build(parse({**ROTARY, **changes})).eval()


@pytest.fixture(scope="module")
def put(small_corpus, tmp_path_factory):
    """put(key=…): the checkpoint of a teacher with random weights and the corpus's tokenizer, or with `tokenizer`."""
    of_corpus = open_corpus(small_corpus).tokenizer

    def made(tokenizer: Tokenizer = of_corpus, **changes) -> str:
        out = tmp_path_factory.mktemp("teacher") / "checkpoint"
        model = random_teacher(**{"vocab_size": tokenizer.size, **changes})
        save_weights(model.config, model.state_dict(), tokenizer, out)
        return str(out)

    return made


@pytest.fixture(scope="module")
def objective(small_corpus):
    return {"name": "prefix_lm", "length": open_corpus(small_corpus).manifest.rows.raw_length}


# What the teacher says of each target


@pytest.mark.parametrize("form", ["a row each", "packed", "balanced"])
@pytest.mark.parametrize("positions", [{"positions": "rotary"}, {"positions": "learned", "max_positions": 11}])
def test_the_teacher_says_what_it_says_of_the_text_read_alone(positions, form):
    """At the token before each target, of the row that was layout, without marks, padding and other examples."""
    teacher = random_teacher(vocab_size=VOCABULARY.size, **positions)
    student = models.build(step_config().model)
    lengths, packed = [12, 8, 4, 10, 12], form == "packed"
    rows, keys = ragged_rows(lengths)
    examples = PrefixLM(length=8 if packed else 12, packed=packed).apply(rows, keys, VOCABULARY, {})
    batch = as_batch(balanced(examples, 2) if form == "balanced" else examples, PAD)
    states, in_text = Distillation(student, teacher, VOCABULARY.size, step_config().wrapper).read(batch)
    counted = batch["labels"] != IGNORE_INDEX
    log_p = torch.log_softmax(teacher.lm_head(states[counted]), dim=-1)
    alone = {}  # by the text so far and its next token; random tokens don't repeat
    for row, length in zip(rows.values.astype(np.int64), lengths, strict=True):
        for part in np.split(row[:length], 2 if packed else 1):
            with torch.no_grad():
                found = torch.log_softmax(teacher.decode(torch.from_numpy(part[None, :-1]))[0], dim=-1)
            alone |= dict(zip(part[1:].tolist(), found, strict=True))
    labels = batch["labels"][counted].tolist()
    compared = 0
    for label, is_text, said in zip(labels, in_text[counted].tolist(), log_p, strict=True):
        assert is_text == (label != VOCABULARY.eos)
        if is_text:
            torch.testing.assert_close(said, alone[label], rtol=0, atol=2e-5)
            compared += 1
    assert compared == len(labels) - len(lengths) * (2 if packed else 1)


BART = {"family": "bart", "d_model": 24, "d_ff": 48, "num_heads": 4, "num_encoder_layers": 1, "num_decoder_layers": 1}
TEACHERS: dict[str, dict[str, object]] = {
    "t5": {"family": "t5", "d_kv": 8, "num_encoder_layers": 2, "num_decoder_layers": 1, "tie_embeddings": True},
    "vanilla": {"family": "vanilla", "num_encoder_layers": 1, "num_decoder_layers": 1},
    "bart": BART,
    "t5gemma2": {"family": "t5gemma2", "num_layers": 2, "num_key_value_heads": 2, "sliding_window": 4},
}


def parameters(model: Model) -> int:
    return sum(one.numel() for one in model.parameters())


def encoder_decoder(family: str, vocab_size: int = VOCABULARY.size, **changes) -> Model:
    torch.manual_seed(2)
    widths = {"d_model": 24, "d_ff": 48, "num_heads": 4, "vocab_size": vocab_size}
    return randomise(models.build(parse({**TEACHERS[family], **widths, **changes})), std=0.3)


OBJECTIVES = {
    "span corruption": SpanCorruption(inputs_length=12, noise_density=0.3),
    "text to text": TextToText(inputs_length=12, targets_length=9),
}


def batch_of(objective: str, packed: bool):
    """Rows of several lengths, padded, or two examples in each row. In pairs, one to eight tokens are the target."""
    rows, keys = ragged_rows([12, 8, 4, 10, 12, 6, 12, 9])
    columns = {"target_start": np.array([4, 3, 2, 5, 11, 5, 8, 2])}
    examples = OBJECTIVES[objective].apply(rows, keys, VOCABULARY, columns)
    return as_batch(balanced(examples, 2) if packed else examples, PAD)


@each(
    "family, objective, packed",
    [
        *itertools.product(["t5"], OBJECTIVES, [False, True]),
        ("vanilla", "span corruption", True),
        ("t5gemma2", "text to text", True),
    ],
)
def test_the_loss_of_an_encoder_decoder_as_teacher_is_that_of_a_plain_loop(family, objective, packed):
    """Over the examples and their targets, one at a time, in fp64: each model reads an example alone."""
    small = step_config().model.model_copy(update={"tie_embeddings": True})
    teacher, student = encoder_decoder(family), randomise(models.build(small), std=0.3)
    assert parameters(student) < parameters(teacher)
    settings = step_config().wrapper
    found = Distillation(student, teacher, VOCABULARY.size, settings)(**batch_of(objective, packed))
    alone = batch_of(objective, packed=False)
    weight, temperature, sums = settings.weight, settings.temperature, torch.zeros(3, dtype=torch.float64)
    for ids, labels, mask in zip(
        alone["encoder_input_ids"], alone["labels"], alone["encoder_attention_mask"], strict=True
    ):
        targets = labels[labels != IGNORE_INDEX]
        logits = []
        for model in (student, teacher):
            with torch.no_grad():
                states = model.encode(ids[None, mask == 1])
                before = torch.tensor([[model.start_id, *targets[:-1].tolist()]])
                logits.append(model.decode(before, states)[0].double())
        for target, z, u in zip(targets, *logits, strict=True):
            likeliest = u.topk(settings.top_k).indices
            p = torch.softmax(u[likeliest] / temperature, dim=0)
            q = torch.softmax(z / temperature, dim=0)[likeliest]
            divergence = temperature**2 * sum(p[i] * (p[i] / q[i]).log() for i in range(settings.top_k))
            own = -torch.log_softmax(z, dim=0)[target]
            sums += torch.stack([(1 - weight) * own + weight * divergence, own, divergence])
    for name, expected in zip(("labels", "cross_entropy", "distillation_loss"), sums.tolist(), strict=True):
        assert float(found[name].detach().double().sum()) == pytest.approx(expected, rel=2e-5)


# The loss of a step


def one_step() -> tuple[float, dict[str, float], dict[str, float], float]:
    """(loss of a step, metrics, means over its targets, the mean without a teacher) of a T5 in two micro-batches."""
    from pretrain.engine.engine import Engine  # DeepSpeed asks the rank's environment for its device

    config = step_config()
    student = models.build(config.model)
    teacher = random_teacher(vocab_size=VOCABULARY.size)
    engine = Engine.initialize(
        student,
        config,
        own_sharding(config),
        wrapper=lambda model: Distillation(model, teacher, VOCABULARY.size, config.wrapper),
    )
    batches = micro_batches()
    targets = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    with torch.no_grad():
        parts = [engine.training_losses(batch) for batch in batches]
        plain = sum(float(engine.losses(batch)["labels"].sum()) for batch in batches) / targets
    means = {name: sum(float(part[name].sum()) for part in parts) / targets for name in parts[0]}
    outcome = engine.step(0, range(len(batches)), batches)
    metrics = Metrics()
    metrics.add_losses(outcome.losses)
    engine.close()
    return outcome.loss, metrics.take(), means, plain


def step_config() -> RunConfig:
    settings = {"name": "distillation", "teacher": "t", "weight": 0.7, "temperature": 2.0, "top_k": 9}
    return run_config(1, {"vocab_size": VOCABULARY.size, "d_model": 16, "d_ff": 16}, wrapper=settings)


def micro_batches():
    rows, keys = ragged_rows([12, 8, 4, 10, 12, 6, 12, 9])
    whole = as_batch(PrefixLM(length=12).apply(rows, keys, VOCABULARY, {}), PAD)
    return [{name: tensor[part] for name, tensor in whole.items()} for part in (slice(4), slice(4, 8))]


def test_the_loss_of_a_step_is_the_mean_over_its_targets():
    """The micro-batches have 16 and 26 of them. Evaluation knows no teacher."""
    ((loss, metrics, means, plain),) = on_ranks(1, one_step)
    assert metrics["train/loss"] == pytest.approx(loss) == pytest.approx(means["labels"], rel=1e-5)
    for name in ("cross_entropy", "distillation_loss"):
        assert metrics[f"train/{name}"] == pytest.approx(means[name], rel=1e-5)
    assert plain == pytest.approx(means["cross_entropy"], rel=1e-5)


# Runs


def distilled(folder: Path, corpus: Path, objective, teacher: str, stage: int, **changes) -> Path:
    settings = {
        "data": {"train": [{"corpus": str(corpus)}], "objective": objective, "lanes": 8, "workers": 0},
        "wrapper": {"name": "distillation", "teacher": teacher, "weight": 0.6, "temperature": 1.5, "top_k": 50},
        "run": {"max_steps": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 4},
        "evaluation": [],
    }
    return run_file(folder, corpus, stage, **{**settings, **changes})


@pytest.mark.slow
def test_runs_repeat_on_any_ranks_and_stages_and_across_a_resume(small_corpus, objective, put, tmp_path):
    """One rank at stage 1, with dropout, is the reference of two at each stage; also a run that is cut and resumed, to
    the bit, and one with examples that share rows, in bf16, whose micro-batch is measured."""
    teacher, made = put(), {}
    for name, stage in (("one", 1), ("1", 1), ("2", 2), ("3", 3), ("cut", 3)):
        made[name] = distilled(tmp_path / name, small_corpus, objective, teacher, stage)
    packed = {
        "train": [{"corpus": str(small_corpus)}],
        "objective": objective,
        "lanes": 8,
        "workers": 0,
        "packing_ratio": 2,
    }
    made["auto"] = distilled(
        tmp_path / "auto",
        small_corpus,
        objective,
        teacher,
        2,
        data=packed,
        batch={"global_batch_size": 16, "micro_batch_size": "auto"},
        precision="bf16",
    )
    assert train_each(1, [(made["one"], None)]) == [[0]]
    starts = [(made["1"], None), (made["2"], None), (made["3"], None), (made["cut"], 2), (made["cut"], None)]
    assert train_each(2, [*starts, (made["auto"], None)]) == [[0, 0, 0, 75, 0, 0]] * 2
    expected = losses(made["one"])
    for stage in "123":
        assert losses(made[stage]) == pytest.approx(expected, rel=1e-5)
    assert losses(made["cut"]) == losses(made["3"])
    assert losses(made["auto"]) == pytest.approx(expected, rel=2e-2)
    rows = [row.metrics for row in read_metrics(made["one"].parent / "run") if "train/loss" in row.metrics]
    assert all(row["train/distillation_loss"] > 0 < row["train/cross_entropy"] for row in rows)
    last = tmp_path / "3/run/checkpoints/step-00000004"
    index = checkpoint_index.read(last)
    assert index.identity["wrapper"]["temperature"] == 1.5
    assert index.identity["wrapper"]["teacher_sha256"]
    student = models.meta_model(index.model)
    assert StoredTensors(last).shapes.keys() == dict(student.named_parameters()).keys()
    refused_on_resume(made["cut"], put)


@pytest.mark.slow
def test_an_encoder_decoder_teaches_sharded_and_across_a_resume(small_corpus, put_t5, tmp_path):
    """The corpus's own span corruption. One rank at stage 1 is the reference of two at stage 3, cut and resumed."""
    teacher = put_t5()
    one, cut = (distilled(tmp_path / str(stage), small_corpus, None, teacher, stage) for stage in (1, 3))
    assert train_each(1, [(one, None)]) == [[0]]
    assert train_each(2, [(cut, 2), (cut, None)]) == [[75, 0]] * 2
    assert losses(cut) == pytest.approx(losses(one), rel=1e-5)


def refused_on_resume(path: Path, put) -> None:
    """Another teacher in the same place, other settings, and none: each is another run."""
    run = json.loads(path.read_text())
    resume = path.parent / "run/checkpoints/step-00000002"

    def told(wrapper) -> list[str]:
        with pytest.raises(UserError) as refused:
            prepare(RunConfig.model_validate({**run, "wrapper": wrapper}), World.on_this_node(), resume)
        of_another, way_out = (
            "the checkpoint of step 2 is of another run: ",
            "; set it back, or start a new run with --fresh or another run.directory",
        )
        return [line.removeprefix(of_another).partition(way_out)[0] for line in str(refused.value).split("\n")]

    prepare(RunConfig.model_validate(run), World.on_this_node(), resume)
    (line,) = told({**run["wrapper"], "teacher": put(init_std=0.2)})
    assert line == "wrapper.teacher differs from the checkpoint's"
    assert told({**run["wrapper"], "top_k": None}) == ["wrapper.top_k is 50 there, null here"]
    assert told(None) == ["wrapper.name is 'distillation' there, null here"]


# What is refused


@pytest.fixture
def refused(small_corpus, tmp_path):
    """The lines of the error for a run with this model, objective and teacher; none if there is no error."""

    def lines(teacher: str, objective=None, model=MODEL) -> list[str]:
        data = {"train": [{"corpus": str(small_corpus)}], "objective": objective}
        run = {"name": "a", "directory": str(tmp_path / "run"), "max_steps": 1}
        config = run_config(model=model, data=data, run=run, wrapper={"name": "distillation", "teacher": teacher})
        try:
            prepare(config, World.on_this_node())
        except UserError as error:
            return str(error).split("\n")
        return []

    return lines


def test_a_teacher_is_there_and_predicts_targets(refused, objective, put, tmp_path, small_corpus):
    assert refused(put(), objective) == []
    missing = str(tmp_path / "missing")
    assert refused(missing, objective) == [f"wrapper.teacher: {missing}: not a checkpoint: no index.json"]
    tokenizer = open_corpus(small_corpus).tokenizer
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_layers": 1, "max_positions": 64}
    config = parse({"family": "encoder_only", **sizes, "vocab_size": tokenizer.size})
    save_weights(config, models.build(config).state_dict(), tokenizer, tmp_path / "bert")
    (line,) = refused(str(tmp_path / "bert"), objective)
    expected = "a model of the family encoder_only; expected an encoder-decoder or a decoder_only model"
    assert line == f"wrapper.teacher: {tmp_path}/bert: {expected}"


@pytest.fixture(scope="module")
def put_t5(small_corpus, tmp_path_factory):
    """put_t5(family, key=…): as `put`, of an encoder-decoder."""
    of_corpus = open_corpus(small_corpus).tokenizer

    def made(family: str = "t5", tokenizer: Tokenizer = of_corpus, **changes) -> str:
        out = tmp_path_factory.mktemp("teacher") / "checkpoint"
        model = encoder_decoder(family, tokenizer.size, **changes)
        save_weights(model.config, model.state_dict(), tokenizer, out)
        return str(out)

    return made


def test_an_encoder_decoder_teaches_any_objective_of_its_tokenizer(refused, objective, put_t5, small_corpus):
    own = open_corpus(small_corpus).tokenizer
    assert refused(put_t5()) == refused(put_t5("t5gemma2"), objective) == []
    teacher = put_t5(tokenizer=Tokenizer(own.model))
    assert refused(teacher) == [f"wrapper.teacher: {teacher}: tokenizer.sentinels is 0 there, 20 here"]


def test_an_encoder_decoder_reads_what_the_model_reads(refused, put_t5, small_corpus):
    """BART's inputs begin with BOS, and it has a limit of positions."""
    inputs, targets = open_corpus(small_corpus).objective.shape
    longest = max(inputs, targets)
    teacher = put_t5("bart", max_positions=longest)
    assert refused(teacher) == [
        f"wrapper.teacher: {teacher}: inputs of the family bart are bos … eos, but those of t5 are … eos"
    ]
    teacher, bart = put_t5("bart", max_positions=longest - 1), {**BART, "max_positions": longest}
    assert refused(teacher, model=bart) == [
        f"wrapper.teacher: {teacher}: reads {longest - 1} tokens at most, but inputs or targets have {longest}"
    ]
    assert refused(put_t5("bart", max_positions=longest), model=bart) == []


def test_a_teacher_has_the_corpuss_tokenizer_perhaps_without_sentinels(refused, objective, put, small_corpus, spiece):
    own = open_corpus(small_corpus).tokenizer
    assert refused(put(Tokenizer(own.model)), objective) == []
    teacher = put(Tokenizer(own.model, sentinels=7))
    assert refused(teacher, objective) == [f"wrapper.teacher: {teacher}: tokenizer.sentinels is 7 there, 20 here"]
    teacher = put(Tokenizer(SentencePiece.read(spiece)))
    (line,) = refused(teacher, objective)
    assert line.startswith(f"wrapper.teacher: {teacher}: tokenizer.sha256 is '")


def test_rows_are_texts_cut_in_two_for_an_encoder_decoder(refused, objective, put, small_corpus):
    (line,) = refused(put())
    assert line == (
        "wrapper: a decoder_only teacher needs rows that are a text cut in two (prefix_lm), but "
        f"{small_corpus} has span_corruption"
    )
    causal = {"name": "causal_lm", "length": objective["length"] - 1}
    lines = refused(put(), causal, {**ROTARY, "d_model": 32})
    assert lines[0].startswith("wrapper: needs an encoder-decoder (t5, bart, ")
    assert lines[0].endswith("), but model.family is decoder_only")
    assert lines[1].endswith("has causal_lm")
    assert len(lines) == 2


def test_a_teacher_reads_all_of_a_text_but_its_last_token(refused, objective, put):
    length = objective["length"]
    assert refused(put(positions="learned", max_positions=length - 1), objective) == []
    teacher = put(positions="learned", max_positions=length - 2)
    assert refused(teacher, objective) == [
        f"wrapper.teacher: {teacher}: reads {length - 2} tokens at most, but texts of the rows have {length - 1}"
    ]
