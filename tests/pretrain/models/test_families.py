"""What holds for every family: how a model starts, what it sees, what padding and packing cost, how it is trained."""

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode

import pretrain.models
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.decoding import Decoder
from pretrain.export import import_
from pretrain.models import FAMILIES as EVERY_FAMILY
from pretrain.models import build, parse
from pretrain.models.encoder_only import EncoderOnly
from pretrain.models.stacks import EncoderDecoder
from pretrain.run.metrics_file import read_metrics
from tests.conftest import made_once, write_c4, write_corpus_file
from tests.support import small_models as small
from tests.support.in_process import done_here, run_here
from tests.support.runs import run_file, train_each
from tests.support.slow import slow
from tests.support.small_models import as_at_the_start, examples_of, gradients, ids, logits_of, made, packed, placed
from tests.support.tables import each

GENERATING = [name for name in small.MODELS if name not in small.ENCODERS]
LENGTHS = [[(7, 4), (3, 6), (5, 2)], [(12, 9)], [(1, 1), (8, 8)]]  # (inputs, targets) of each example of each row


# The code


def test_configs_do_not_import_torch():
    code = "import sys, pretrain.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_five_files_are_read_from_the_ids_to_the_loss():
    """Those of models that a forward pass enters: below them are functions of tensors."""
    model, entered = as_at_the_start("t5", dropout_rate=0.1).train(), set()
    sys.setprofile(lambda frame, *_: entered.add(Path(frame.f_code.co_filename)))
    try:
        model(ids(2, 9), ids(2, 7), encoder_attention_mask=torch.ones(2, 9))
    finally:
        sys.setprofile(None)
    files = [file for file in entered if file.parent == Path(pretrain.models.__file__).parent]
    assert {file.stem for file in files} == {"t5", "stacks", "layers", "attention", "model"}
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1200


# How a model starts


@each("name", small.MODELS)
def test_first_loss_is_that_of_a_uniform_guess(name):
    for width, vocabulary in ((128, 1100), (512, 8000)):
        given, wide = small.MODELS[name], {"d_model": width, "d_ff": 2 * width}
        if "encoder" in given:
            wide = {stack: {**given[stack], **wide, "num_layers": 2} for stack in ("encoder", "decoder")}
        torch.manual_seed(0)
        small_logits = {"init_output_std": 0.5} if given["family"] in ("t5", "vanilla") else {}  # not so as published
        model = build(parse({**given, "dropout_rate": 0.0, "vocab_size": vocabulary, **wide, **small_logits}))
        with torch.no_grad():
            found = model(ids(4, 40, vocabulary=vocabulary), ids(4, 40, seed=1, vocabulary=vocabulary))
        assert found["labels"].mean().item() == pytest.approx(math.log(vocabulary), abs=0.3)


# The branches of a layer, whose ends are drawn smaller.
BRANCHES = {"modern": (2, 3), "decoder_only": (2, 2), "autoregressive": (2, 2), "double_decoder": (2, 2)}


def std_at_the_start(config, name, weight):
    kind = name.split(".")[-2]
    if config.family == "t5":
        d = config.d_model
        sizes = {"embedding": 1, "q": d * config.d_kv, "o": weight.size(1), "wo": weight.size(1)}
        return sizes.get(kind, d) ** -0.5
    if config.family == "vanilla":  # Xavier's
        return config.d_model**-0.5 if kind == "embedding" else (2 / sum(weight.shape)) ** 0.5
    if kind not in ("o", "wo") or config.family not in BRANCHES:
        return 0.02
    side = "encoder" if name.startswith("encoder") else "decoder"
    layers = getattr(config, f"num_{side}_layers", 0) or getattr(getattr(config, side, config), "num_layers", 0)
    return 0.02 / (BRANCHES[config.family][side == "decoder"] * layers) ** 0.5


@each("name", small.ONE_OF_EACH_FAMILY)
def test_weights_at_the_start(name):
    given, wide = small.MODELS[name], {"d_model": 256, "d_ff": 512, "num_heads": 8}
    if "encoder" in given:
        wide = {stack: {**given[stack], **wide} for stack in ("encoder", "decoder")}
    if "num_decoder_layers" in given:
        wide["num_decoder_layers"] = 5
    model = as_at_the_start(name, vocab_size=2000, **wide)
    for key, weight in model.named_parameters():
        if weight.dim() > 1:
            deviation = (2 * weight.numel()) ** -0.5
            expected = pytest.approx(std_at_the_start(model.config, key, weight), rel=4 * deviation)
            assert weight.std().item() == expected, key
        else:
            gain = key.endswith("norm.weight") and "t5gemma" not in name  # whose norms multiply by 1 + weight
            assert weight.unique().tolist() == [float(gain)], key


def test_matrices_are_shared_as_configured():
    for name in ("t5, tied", "bart", "vanilla"):
        model = as_at_the_start(name)
        assert model.lm_head.weight is model.embedding.weight
        assert [key for key, one in model.named_parameters() if small.VOCABULARY in one.shape] == ["embedding.weight"]
    for name, kinds in (("modern", ("none", "output", "all")), ("t5", (False, True))):
        sizes = [as_at_the_start(name, tie_embeddings=tied).num_parameters() for tied in kinds]
        assert {before - after for before, after in itertools.pairwise(sizes)} == {small.VOCABULARY * 32}


@each("name", small.MODELS)
@torch.no_grad()
def test_bfloat16_weights_give_nearly_the_same_losses(name):
    model = as_at_the_start(name).train()
    batch = packed(examples_of(model, LENGTHS))
    exact = model(**batch)
    for kind, rounded in model.bfloat16()(**batch).items():
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, exact[kind], rtol=0, atol=0.1)
        assert rounded.mean().item() == pytest.approx(exact[kind].mean().item(), rel=0.02)


@each("name", small.MODELS)
def test_a_config_comes_back_from_a_checkpoint_as_it_was(name):
    config = as_at_the_start(name).config
    assert parse(config.model_dump()) == config


# What each output sees


@each("name", GENERATING)
@torch.no_grad()
def test_no_output_sees_a_later_token(name, device):
    model, tokens = placed(made(name), device), ids(2, 14)
    states = [model.encode(ids(2, 12, seed=3))] if isinstance(model, EncoderDecoder) else []
    before = model.decode(tokens, *states)
    assert before.std() > 0.1  # the comparison is not one of zeros
    for place in range(1, 14):
        changed = tokens.clone()
        changed[:, place] = 5 + (changed[:, place] + 7) % (small.VOCABULARY - 5)
        after = model.decode(changed, *states)
        assert torch.equal(before[:, :place], after[:, :place]), place
        assert (before[:, place:] != after[:, place:]).any(dim=-1).all(), place


@each("name", small.MODELS)
@torch.no_grad()
def test_positions_matter(name):
    """Without them, what sees all tokens would see the same whatever their order."""
    model, inputs, labels = made(name), ids(1, 12), ids(1, 12, seed=1)
    turned = torch.cat([inputs[:, :11].flip(1), inputs[:, 11:]], dim=1)
    before, after = logits_of(model, inputs, labels), logits_of(model, turned, labels)
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-2


@each("name", small.MODELS)
@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_the_logits(name, device):
    model, inputs, labels = placed(made(name), device), ids(2, 9), ids(2, 9, seed=1)
    labels[0, 4:] = IGNORE_INDEX
    expected = F.cross_entropy(logits_of(model, inputs, labels).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(model(inputs, labels)["labels"].double(), expected, rtol=0, atol=1e-5)


def assert_as_alone(model, rows, batch):
    """Losses of a batch and the gradients of their weighted sum are those of its examples alone."""
    together = model(**batch)
    weights = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kinds = [kind for kind, losses in together.items() if losses.dim() == 2]  # others are of rows
    found = gradients(model, sum((together[kind] * weights).sum() for kind in kinds))
    total = torch.zeros((), dtype=torch.float64)
    for row, examples in enumerate(rows):
        start = 0
        for inputs, labels in examples:
            here = slice(start, start + labels.size(1))
            alone = model(inputs, labels)
            for kind in kinds:
                torch.testing.assert_close(together[kind][row : row + 1, here], alone[kind], rtol=0, atol=1e-10)
                total = total + (alone[kind] * weights[row : row + 1, here]).sum()
            start = here.stop
        for kind in kinds:
            assert together[kind][row, start:].count_nonzero() == 0
    expected = gradients(model, total)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        own = float(gradient.abs().max())
        assert own > 0, name
        # softmax cancels a bias of keys: its gradient is rounding alone
        scale = largest if name.endswith(".k.bias") else own
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10 * scale, msg=name)


@each("name", small.MODELS)
def test_packed_examples_have_the_losses_and_gradients_of_each_alone(name, device):
    model = placed(made(name, z_loss=1e-3, label_smoothing=0.1).train(), device)
    rows = examples_of(model, LENGTHS)
    assert_as_alone(model, rows, packed(rows))


@each("name", small.MODELS)
def test_padding_changes_nothing_and_costs_nothing(name, device):
    model = placed(made(name).train(), device)
    rows = examples_of(model, [[(12, 10)], [(7, 4)], [(1, 12)]])
    batch = packed(rows)
    batch = {key: batch[key] for key in ("encoder_input_ids", "labels", "encoder_attention_mask")}
    mask = batch["encoder_attention_mask"]
    batch["encoder_input_ids"] = torch.where(mask > 0, batch["encoder_input_ids"], ids(*mask.shape, seed=7))
    assert_as_alone(model, rows, batch)


@each("name", small.MODELS)
def test_rows_of_padding_alone_give_finite_gradients(name, device):
    model = placed(made(name).float().train(), device)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]])
    labels = torch.tensor([[5, 6, 7], [IGNORE_INDEX] * 3, [6, 7, IGNORE_INDEX], [IGNORE_INDEX] * 3])
    if not isinstance(model, EncoderDecoder):
        labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    for rows in (slice(0, 4), slice(1, 2)):
        losses = model(ids(4, 3)[rows], labels[rows], encoder_attention_mask=mask[rows])
        assert losses["labels"][labels[rows] == IGNORE_INDEX].count_nonzero() == 0
        found = gradients(model, sum(values.sum() for values in losses.values()))
        assert all(gradient.isfinite().all() for gradient in found.values())


# Decoding


@each("name", small.DECODERS)
@torch.no_grad()
def test_padded_prompts_and_cached_decoding_give_the_logits_of_each_alone(name, device):
    """Prompts of 20, 13 and 1 tokens, padded on the left, which continue for 5 tokens."""
    model, tokens = placed(made(name), device), ids(3, 25)
    for lengths in ([20, 20, 20], [20, 13, 1]):
        mask = (torch.arange(25) >= 20 - torch.tensor(lengths)[:, None]).long()
        cache, pieces, start = model.new_cache(), [], 0
        for end in (1, 2, 5, 20, 21, 25):
            given = None if min(lengths) == 20 else mask[:, :end]
            pieces.append(model.decode(tokens[:, start:end], cache, given))
            start = end
        whole = model.decode(tokens, attention_mask=None if min(lengths) == 20 else mask)
        for row, length in enumerate(lengths):
            alone = model.decode(tokens[row : row + 1, 20 - length :])[0]
            torch.testing.assert_close(whole[row, 20 - length :], alone, rtol=0, atol=1e-12)
            torch.testing.assert_close(torch.cat(pieces, dim=1)[row, 20 - length :], alone, rtol=0, atol=1e-12)


@each(
    "kind, padded",
    [*((kind, True) for kind in (*small.ENCODER_DECODERS, *small.DECODERS)), ("t5", False), ("gemma 3", False)],
)
@torch.no_grad()
def test_each_step_equals_recomputation(kind, padded):
    """Over more tokens than a window holds. Hypotheses change places at random, and examples leave."""
    model = made(kind)
    prompts = ids(4, 20, vocabulary=90)
    mask = torch.ones_like(prompts)
    if padded:
        mask = (torch.arange(20) < torch.tensor([20, 3, 11, 15])[:, None]).long()
        mask = mask if hasattr(model, "encode") else mask.flip(1)
        prompts = prompts.masked_fill(mask == 0, 0)
    draws = random.Random(0)
    decoder = Decoder(model, prompts, mask if padded else None)
    tokens = decoder.prompt
    texts, rows = tokens, torch.arange(4)  # all tokens of each hypothesis, and its example
    for step in range(15):
        found = decoder.step(tokens)
        if hasattr(model, "encode"):
            expected = model.decode(texts, model.encode(prompts[rows], mask[rows]), mask[rows])
        else:
            new = torch.ones(len(rows), texts.size(1) - 20, dtype=torch.long)
            expected = model.decode(texts, attention_mask=torch.cat([mask[rows], new], dim=1))
        torch.testing.assert_close(found, expected[:, -1], rtol=1e-9, atol=1e-9)
        if step == 2:  # three hypotheses for each example
            origin = torch.arange(4).repeat_interleave(3)
        elif step in (6, 10):
            origin = (rows[:, None] == torch.tensor({6: [0, 2, 3], 10: [2]}[step])).any(dim=1).nonzero()[:, 0]
        elif step > 2:
            origin = torch.tensor([row - row % 3 + draws.randrange(3) for row in range(len(rows))])
        else:
            origin = torch.arange(4)
        before = [layer[1].entries for layer in decoder._cache] if kind == "t5" else []
        decoder.select(origin)
        if len(origin) == len(rows):  # the input's keys and values stay in place while hypotheses move
            assert all(layer[1].entries is one for layer, one in zip(decoder._cache, before, strict=False))
        tokens = torch.tensor([[draws.randrange(3, 90)] for _ in origin])
        texts, rows = torch.cat([texts[origin], tokens], dim=1), rows[origin]


# Training


@each("name", small.ONE_OF_EACH_FAMILY)
def test_dropout_z_loss_and_smoothing_belong_to_training(name):
    batch = ids(2, 6), ids(2, 6, seed=1)
    plain = made(name)(*batch)["labels"]
    others = [{"attention_dropout_rate": 0.2}, {"activation_dropout_rate": 0.2}] if name == "bart" else []
    for change in ({"dropout_rate": 0.2}, {"z_loss": 0.1}, {"label_smoothing": 0.1}, *others):
        model = made(name, **change)
        assert torch.equal(model(*batch)["labels"], plain)
        trained = model.train()(*batch)["labels"]
        if "z_loss" in change:
            assert (trained > plain).all()
        else:
            assert not torch.equal(trained, plain)
        assert torch.equal(model(*batch)["labels"], trained) == ("dropout" not in str(change))


# Devices


@pytest.fixture
def elsewhere() -> Iterator[torch.device]:
    """A device that stands in for a GPU: PyTorch's `meta`, whose tensors have no values.

    Within the test an operation on tensors of two devices fails, as it does with a CPU and a GPU.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.device("meta")


def test_two_devices_are_noticed(elsewhere):
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device=elsewhere) + torch.arange(3)


@each("name", small.MODELS)
def test_a_training_step_makes_no_tensor_on_another_device(name, elsewhere):
    with elsewhere:
        model = build(parse({"vocab_size": small.VOCABULARY, "dropout_rate": 0.1, **small.MODELS[name]})).train()
    tokens = torch.ones(4, 16, dtype=torch.long, device=elsewhere)
    plain = {"encoder_input_ids": tokens, "labels": tokens}
    padded = {**plain, "encoder_attention_mask": tokens}
    kinds = [f"{side}_{what}" for side in ("encoder", "decoder") for what in ("segment_ids", "positions")]
    simple = [plain, padded] if name in small.ONE_OF_EACH_FAMILY else []
    for batch in (*simple, {**padded, **dict.fromkeys(kinds, tokens)}):
        model.zero_grad()
        if isinstance(model, EncoderOnly):  # its loss takes the rows of labels that count: their number needs values
            losses = {
                "logits": small.masked_lm_logits(model, model.encode(tokens, batch.get("encoder_attention_mask")))
            }
        else:
            losses = model(**batch)
        sum(values.sum() for values in losses.values()).backward()
        assert {values.device for values in losses.values()} == {elsewhere}
        assert {one.grad.device for one in model.parameters() if one.grad is not None} == {elsewhere}


@each("name", GENERATING)
@torch.no_grad()
def test_decoding_with_a_cache_makes_no_tensor_on_another_device(name, elsewhere):
    with elsewhere:
        model = build(parse({"vocab_size": small.VOCABULARY, **small.MODELS[name]})).eval()
    tokens, cache = torch.ones(4, 16, dtype=torch.long, device=elsewhere), model.new_cache()
    if isinstance(model, EncoderDecoder):
        states = model.encode(tokens, tokens)
        logits = [model.decode(tokens[:, :1], states, tokens, cache) for _ in range(2)]
    else:
        longer = torch.cat([tokens, tokens[:, :1]], dim=1)
        logits = [model.decode(tokens, cache, tokens), model.decode(tokens[:, :1], cache, longer)]
    assert {one.device for one in logits} == {elsewhere}


# What is refused

STACK = small.STACK
REFUSED = [
    ("t5", {"d_modle": 3}, "Extra inputs"),
    ("t5", {"d_model": 0}, "greater than 0"),
    ("t5", {"dropout_rate": 1.0}, "less than 1"),
    ("t5", {"relative_attention_max_distance": 16}, "must exceed half"),
    ("t5", {"positions": "absolute"}, "'relative', 'rotary', 'alibi', 'sinusoidal' or 'learned'"),
    ("t5", {"positions": "learned"}, "max_positions is missing: learned positions need it"),
    ("t5", {"max_positions": 512}, "max_positions: relative positions have no limit"),
    ("t5", {"positions": "rotary", "d_kv": 15}, "15 is odd"),
    ("t5", {"positions": "alibi", "relative_attention_num_buckets": 16}, "for relative positions, not for alibi ones"),
    ("bart", {"num_heads": 5}, "5 doesn't divide d_model 32"),
    ("vanilla", {"d_model": 63, "num_heads": 3}, "63 is odd"),
    ("t5gemma", {"decoder": {**STACK, "head_dim": 7}}, "7 is odd"),
    ("t5gemma", {"sliding_window": None, "full_attention_every": 2}, "full_attention_every: needs a sliding_window"),
    ("t5gemma2", {"num_key_value_heads": 3}, "3 doesn't divide num_heads 4"),
    ("modern", {"encoder": small.WIDER}, "tie_embeddings: one matrix can't be 48 wide in the encoder and 32 in the"),
    ("decoder_only", {"num_heads": 5}, "5 doesn't divide d_model 32"),
    ("decoder_only", {"max_positions": None}, "max_positions is missing"),
    ("decoder_only", {"positions": "rotary"}, "rotary positions have no limit"),
    ("decoder_only, rotary", {"num_heads": 32}, "heads of even width"),
    ("decoder_only, alibi", {"subtract_positions": "with_norm"}, "needs learned positions"),
    ("decoder_only", {"rope_base": 1e6}, "rope_base, rope_factor: need rotary positions"),
    ("decoder_only, alibi", {"rope_factor": 2.0}, "rope_base, rope_factor: need rotary positions"),
    ("llama", {"prefix_attention": "bidirectional", "sliding_window": 4}, "prefix_attention"),
    ("decoder_only, alibi", {"prefix_attention": "bidirectional"}, "prefix_attention"),
    ("autoregressive, plain", {"num_heads": 3}, "num_heads 3 doesn't divide d_model 32; num_cross_heads 6 doesn't div"),
    ("autoregressive, plain", {"max_positions": None}, "max_positions is missing"),
    ("autoregressive, plain", {"positions": "rotary"}, "max_positions: rotary positions have no table"),
    ("autoregressive, rotary", {"num_heads": 16, "num_cross_heads": None}, "num_cross_heads 32 makes heads of 1"),
    ("autoregressive, rotary", {"add_positions": True}, "max_positions is missing"),
    ("autoregressive, rotary", {"subtract_positions": "with_norm"}, "nothing to subtract; set add_positions: true"),
    ("autoregressive, rotary", {"embedding_loss": {"kind": "l1", "aggregation": "matrix"}}, "max_positions is missing"),
    ("autoregressive, plain", {"embedding_loss": {"kind": "l1", "aggregation": "convolution"}}, "kernel_size is None"),
    ("autoregressive, plain", {"embedding_loss": {"kind": "l1", "kernel_size": 3}}, "kernel_size is 3"),
    ("autoregressive, plain", {"embedding_loss": {"kind": "mse", "coefficient": 0}}, "greater than 0"),
]


@each("name, wrong, expected", REFUSED)
def test_an_unknown_or_impossible_setting_is_refused(name, wrong, expected):
    with pytest.raises(ValidationError, match=expected):
        parse({"vocab_size": 100, **small.MODELS[name], **wrong})


# Trained by two ranks at ZeRO stage 2, then generating and exported

LENGTH = 64
OBJECTIVES = {
    **dict.fromkeys(("bart", "vanilla"), "noised"),
    **dict.fromkeys(("autoregressive", "double_decoder", "decoder_only"), "causal"),
    "encoder_only": "masked",
}  # others learn from spans
FIRST = ("t5gemma2", "autoregressive, plain")
OTHERS = tuple(name for name in small.ONE_OF_EACH_FAMILY if name not in FIRST)


def test_every_family_is_here():
    assert EVERY_FAMILY.keys() == {settings["family"] for settings in small.MODELS.values()}


@pytest.fixture(scope="module")
def corpora(small_corpus):
    """A corpus for each objective, all of the same pages and pieces."""
    noised = {"objective": {"name": "denoising", "length": LENGTH}, "packing": "complete_documents"}
    masked = {"objective": {"name": "masked_lm", "length": LENGTH}, "packing": "complete_documents"}
    kinds = {
        "noised": (noised, ["<mask>", "<s>"]),
        "causal": ({"objective": {"name": "causal_lm", "length": LENGTH}}, []),
        "masked": (masked, ["[CLS]", "[SEP]", "<mask>"]),
    }

    def make(folder):
        write_c4(folder / "c4.json.gz", records=60)
        for name, (rows, special) in kinds.items():
            model = str(small_corpus / "tokenizer/spiece.model")
            path = write_corpus_file(
                folder / f"{name}.yaml",
                output=str(folder / name),
                tokenizer={"path": model, "special_tokens": special, "sentinels": 0},
                rows=rows,
            )
            done_here("data-pipeline", "build", path)

    folder = made_once("families", make)
    return {"spans": small_corpus, **{name: folder / name for name in kinds}}


@pytest.mark.parametrize("names", [FIRST, *slow((OTHERS[:4],), (OTHERS[4:],))], ids=" ".join)
def test_a_family_trains_generates_and_is_exported(names, corpora, tmp_path, subtests):
    models = {small.MODELS[name]["family"]: small.MODELS[name] for name in names}
    if "vanilla" in models:  # the logits of its paper's tied matrix are large
        models["vanilla"] = {**models["vanilla"], "init_output_std": 0.5}
    paths = {
        family: run_file(
            tmp_path / family, corpora[OBJECTIVES.get(family, "spans")], model=settings, run={"max_steps": 4}
        )
        for family, settings in models.items()
    }
    assert train_each(2, [(path, None) for path in paths.values()]) == [[0] * len(paths)] * 2
    for family, path in paths.items():
        with subtests.test(family):
            check_trained(family, path.parent)


def check_trained(family, folder):
    rows = read_metrics(folder / "run")
    losses = [row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics]
    assert len(losses) == 4
    assert all(math.isfinite(value) for row in rows for value in row.metrics.values())
    assert any(name.startswith("validation/") for row in rows for name in row.metrics)
    trained = TrainedModel.open(folder / "run/checkpoints/step-00000004")
    assert losses[0] == pytest.approx(math.log(trained.tokenizer.size), abs=0.5)

    told = run_here("pretrain", "generate", folder / "run", "Thank you for", "A longer text", "--max-new-tokens", "5")
    if family == "encoder_only":
        assert "models of the family encoder_only don't generate text" in told.stderr
    else:
        assert told.returncode == 0, told.stderr
    done_here("pretrain", "export", folder / "run", folder / "out")
    assert import_(folder / "out", folder / "imported").family == family
    again = TrainedModel.open(folder / "imported")
    assert again.tokenizer.describe() == trained.tokenizer.describe()
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, trained.model.state_dict()[name]), name
