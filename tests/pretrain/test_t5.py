"""T5, compared with its paper's numbers and with transformers, the reference implementation."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError

from data_pipeline.foundation.errors import UserError
from pretrain.config import RunConfig
from pretrain.huggingface import load_state
from pretrain.models import T5Config, build
from pretrain.models.logit_bias import toeplitz
from pretrain.models.loss import shift_right, token_losses
from pretrain.models.model import Sizes
from pretrain.models.positions import RelativePositionBias, relative_position_bucket
from pretrain.trainer.validate import validate
from tests.pretrain.placed import placed

V1_0 = {"feed_forward": "relu", "tie_embeddings": True}
V1_1 = {"feed_forward": "gated-gelu", "tie_embeddings": False}
MODELS = Path(__file__).parents[2] / "configs/models"
POSITIONS = {
    "relative": {},
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "sinusoidal": {"positions": "sinusoidal"},
    "learned": {"positions": "learned", "max_positions": 64},
}
each_position = pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)


def tiny(**changes):
    sizes = {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4}
    return T5Config(**{**sizes, "num_encoder_layers": 2, "num_decoder_layers": 2, **changes})


def ids(*shape, seed=0, vocab_size=500):
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def losses_of(model, *batch, **masks):
    return model(*batch, **masks)["labels"]


def of_random_weights(settings):
    """A T5 in fp64 in which attention matters: equal values agree to many digits."""
    torch.manual_seed(0)
    model = build(tiny(**settings)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    return model


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build(tiny()).eval()


# First distance of each bucket, 32 buckets up to distance 128.
BIDIRECTIONAL = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
UNIDIRECTIONAL = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_buckets():
    def buckets(firsts):
        return [sum(first <= distance for first in firsts) - 1 for distance in range(300)]

    keys_before, keys_after = -torch.arange(300), torch.arange(1, 300)
    both, causal = buckets(BIDIRECTIONAL), buckets(UNIDIRECTIONAL)
    assert relative_position_bucket(keys_before, bidirectional=True).tolist() == both
    assert relative_position_bucket(keys_after, bidirectional=True).tolist() == [16 + bucket for bucket in both[1:]]
    assert relative_position_bucket(keys_before, bidirectional=False).tolist() == causal
    assert relative_position_bucket(keys_after, bidirectional=False).unique().tolist() == [0]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 9), (3, 200), (150, 150)])
def test_relative_bias_of_a_query_and_a_key_is_that_of_their_distance(bidirectional, queries, keys):
    bias = RelativePositionBias(32, 128, 4, bidirectional, std=1.0)
    positions = torch.arange(keys)
    distances = positions[None, :] - positions[keys - queries :, None]
    expected = bias.weight[relative_position_bucket(distances, bidirectional)].permute(2, 0, 1)[None]
    found = toeplitz(bias(queries, keys), keys)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.is_contiguous()  # else PyTorch's attention copies it in each layer


PUBLISHED = {
    "v1.0-small": 60_506_624,
    "v1.0-base": 222_903_552,
    "v1.0-large": 737_668_096,
    "v1.0-3b": 2_851_598_336,
    "v1.0-11b": 11_307_321_344,
    "v1.1-small": 76_961_152,
    "v1.1-base": 247_577_856,
    "v1.1-large": 783_150_080,
    "v1.1-xl": 2_849_757_184,
    "v1.1-xxl": 11_135_332_352,
}


SMALLER = {"v1.1-1m": 968_192, "v1.1-5m": 4_755_712, "v1.1-15m": 15_472_384}


def test_every_shipped_t5_has_its_parameters():
    names = {path.stem.removeprefix("t5-") for path in MODELS.glob("t5-*.yaml")}
    assert names == PUBLISHED.keys() | SMALLER.keys()


@pytest.mark.parametrize(("name", "expected"), (PUBLISHED | SMALLER).items(), ids=PUBLISHED | SMALLER)
def test_parameter_counts_are_those_of_transformers(name, expected):
    transformers = pytest.importorskip("transformers")
    text = (MODELS / f"t5-{name}.yaml").read_text(encoding="utf-8")
    config = T5Config(**yaml.safe_load(text)["model"])
    theirs = transformers.T5Config(
        vocab_size=config.padded_vocab_size,
        d_model=config.d_model,
        d_kv=config.d_kv,
        d_ff=config.d_ff,
        num_heads=config.num_heads,
        num_layers=config.num_encoder_layers,
        feed_forward_proj=config.feed_forward,
    )
    with torch.device("meta"):
        model, reference = build(config), transformers.T5ForConditionalGeneration(theirs)
    assert model.num_parameters() == expected
    assert f": {expected:,} parameters." in text.splitlines()[0]
    untied = 0 if config.tie_embeddings else config.padded_vocab_size * config.d_model  # the reference is built tied
    assert sum(parameter.numel() for parameter in reference.parameters()) + untied == expected


@pytest.mark.parametrize(
    "version", [V1_0, V1_1, *list(POSITIONS.values())[1:]], ids=["v1.0", "v1.1", *list(POSITIONS)[1:]]
)
@pytest.mark.parametrize(("d_model", "vocab_size"), [(128, 1100), (512, 8000)])
def test_first_loss_with_small_first_logits_is_that_of_a_uniform_guess(version, d_model, vocab_size):
    assert first_loss(d_model, vocab_size, init_output_std=0.5, **version) == pytest.approx(
        math.log(vocab_size), abs=0.3
    )


@pytest.mark.parametrize(("d_model", "vocab_size"), [(128, 1100), (512, 8000)])
def test_first_loss_with_the_published_deviations(d_model, vocab_size):
    """Unit normal logits: ln V + 1/2. v1.0's tied matrix makes the decoder predict its own input, which costs more."""
    assert first_loss(d_model, vocab_size, **V1_1) == pytest.approx(math.log(vocab_size) + 0.5, abs=0.1)
    assert first_loss(d_model, vocab_size, **V1_0) > math.log(vocab_size) + 0.6


def first_loss(d_model, vocab_size, **settings):
    torch.manual_seed(0)
    model = build(tiny(d_model=d_model, d_kv=32, d_ff=2 * d_model, vocab_size=vocab_size, **settings))
    with torch.no_grad():
        losses = model(ids(8, 40, vocab_size=vocab_size), ids(8, 20, seed=1, vocab_size=vocab_size))["labels"]
    return losses.mean().item()


def test_standard_deviations_at_the_start():
    torch.manual_seed(0)
    d_model, d_kv, heads, d_ff = 256, 32, 8, 512
    model = build(tiny(vocab_size=2000, d_model=d_model, d_kv=d_kv, num_heads=heads, d_ff=d_ff))
    layer = model.decoder.layers[1]
    for weight, std in [
        (model.embedding.weight, 1.0),
        (layer.self_attention.q.weight, (d_model * d_kv) ** -0.5),
        (layer.cross_attention.k.weight, d_model**-0.5),
        (layer.cross_attention.v.weight, d_model**-0.5),
        (layer.self_attention.o.weight, (heads * d_kv) ** -0.5),
        (layer.feed_forward.wi_0.weight, d_model**-0.5),
        (layer.feed_forward.wi_1.weight, d_model**-0.5),
        (layer.feed_forward.wo.weight, d_ff**-0.5),
        (model.lm_head.weight, d_model**-0.5),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert model.encoder.relative_attention_bias.weight.std().item() == pytest.approx(d_model**-0.5, rel=0.2)
    assert layer.feed_forward_norm.weight.unique().tolist() == [1.0]


@each_position
def test_a_target_does_not_see_later_targets(positions, device):
    model = placed(of_random_weights(positions), device)
    inputs, targets = ids(2, 12), ids(2, 10, seed=1)
    changed = targets.clone()
    changed[:, 6] += 1
    states = model.encode(inputs)
    before, after = model.decode(targets, states), model.decode(changed, states)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=0)
    assert (before[:, 6:] != after[:, 6:]).any(dim=-1).all()


@each_position
def test_padding_of_the_inputs_changes_nothing(positions, device):
    model = placed(of_random_weights(positions), device)
    inputs, labels = ids(2, 12), ids(2, 10, seed=1)
    padded = torch.cat([inputs, ids(2, 5, seed=2)], dim=1)  # masked values don't matter
    mask = torch.cat([torch.ones(2, 12), torch.zeros(2, 5)], dim=1).long()
    torch.testing.assert_close(
        losses_of(model, padded, labels, encoder_attention_mask=mask),
        losses_of(model, inputs, labels),
        rtol=0,
        atol=1e-10,
    )


def test_padding_of_the_targets_changes_nothing_and_costs_nothing(model, device):
    model = placed(model, device)
    inputs, labels = ids(2, 12), ids(2, 10, seed=1)
    padded = torch.cat([labels, torch.full((2, 4), -100)], dim=1)
    losses = losses_of(model, inputs, padded)
    torch.testing.assert_close(losses[:, :10], losses_of(model, inputs, labels), rtol=0, atol=1e-5)
    assert losses[:, 10:].unique().tolist() == [0.0]


def test_a_row_of_padding_alone_gives_finite_gradients(model, device):
    model = placed(model, device)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    losses = losses_of(model, ids(2, 3), torch.tensor([[5, 1], [-100, -100]]), encoder_attention_mask=mask)
    losses.sum().backward()
    assert losses[1].tolist() == [0.0, 0.0]
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_labels_move_one_to_the_right():
    assert shift_right(torch.tensor([[5, 6, 1, -100], [7, 1, -100, -100]]), 0).tolist() == [[0, 5, 6, 1], [0, 7, 1, 0]]


def test_token_losses_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0], [5.0, 1.0]]])  # probabilities 1/4 3/4, 1/2 1/2
    labels = torch.tensor([[1, 0, -100]])
    expected = torch.tensor([[math.log(4 / 3), math.log(2), 0.0]])
    torch.testing.assert_close(token_losses(logits, labels), expected)
    z = torch.tensor([[math.log(4) ** 2, math.log(2) ** 2, 0.0]])
    torch.testing.assert_close(token_losses(logits, labels, z_loss=0.1), expected + 0.1 * z)
    assert token_losses(logits.bfloat16(), labels).dtype == torch.float32


def test_z_loss_is_part_of_training_only():
    torch.manual_seed(0)
    model = build(tiny(z_loss=0.1))
    batch = ids(2, 5), ids(2, 4)
    trained = losses_of(model.train(), *batch)
    evaluated = losses_of(model.eval(), *batch)
    assert (trained > evaluated).all()


def test_dropout_belongs_to_training():
    torch.manual_seed(0)
    model = build(tiny(dropout_rate=0.2))
    batch = ids(2, 5), ids(2, 4)
    assert not torch.equal(losses_of(model.train(), *batch), losses_of(model, *batch))
    assert torch.equal(losses_of(model.eval(), *batch), losses_of(model, *batch))


def test_bfloat16_weights_give_nearly_the_same_losses(model, device):
    model = placed(model, device)
    batch = ids(4, 30), ids(4, 20, seed=1)
    mask = torch.ones(4, 30).long()
    mask[0, 20:] = 0
    exact = losses_of(model, *batch, encoder_attention_mask=mask)
    rounded = losses_of(model.bfloat16(), *batch, encoder_attention_mask=mask)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.1)


@pytest.mark.slow
def test_the_graph_is_whole_for_the_compiler(model):
    batch = ids(2, 9), ids(2, 6, seed=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(losses_of(compiled, *batch), losses_of(model, *batch), rtol=0, atol=1e-5)


def randomised(version, tmp_path):
    """A T5 in transformers in which every weight is random, read back from its saved checkpoint."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=500,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=3,
        feed_forward_proj=version["feed_forward"],
        tie_word_embeddings=version["tie_embeddings"],
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    reference = transformers.T5ForConditionalGeneration(config)
    if not version["tie_embeddings"]:  # transformers 5 builds every T5 tied; a loaded one need not be
        reference.lm_head.weight = torch.nn.Parameter(torch.empty(500, 64))
    torch.manual_seed(1)
    for name, parameter in reference.named_parameters():
        std = 1.0 if name in ("shared.weight", "lm_head.weight") else 0.1
        torch.nn.init.normal_(parameter, mean=float("layer_norm" in name), std=std)
    reference.save_pretrained(tmp_path)
    reference = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    shared = reference.lm_head.weight is reference.shared.weight
    assert shared == version["tie_embeddings"]
    return reference


@pytest.mark.parametrize("version", [V1_0, V1_1], ids=["v1.0", "v1.1"])
def test_logits_and_loss_are_those_of_transformers(version, device, tmp_path):
    reference = randomised(version, tmp_path)
    config, state = load_state(tmp_path)
    assert config.tie_embeddings == version["tie_embeddings"]
    model = build(config).eval()
    model.load_state_dict(state)
    model = placed(model, device)
    inputs, labels = ids(3, 150), ids(3, 140, seed=1)
    mask = torch.ones(3, 150).long()
    mask[1, 100:] = 0
    mask[2, 1:] = 0
    labels[1, 90:] = -100
    with torch.no_grad():
        expected = reference(input_ids=inputs, attention_mask=mask, labels=labels)
        logits = model.decode(shift_right(labels, 0), model.encode(inputs, mask), mask)
        losses = losses_of(model, inputs, labels, encoder_attention_mask=mask)
    assert expected.logits.std() > 0.5  # the comparison is not one of zeros
    assert (logits - expected.logits).abs().max() < 1e-4
    assert (losses.sum() / (labels != -100).sum()).item() == pytest.approx(expected.loss.item(), abs=1e-5)


def test_the_tied_matrix_is_one_parameter():
    model = build(tiny(**V1_0))
    assert model.lm_head.weight is model.embedding.weight
    assert build(tiny(**V1_1)).num_parameters() - model.num_parameters() == 500 * 64 + 4 * 64 * 96


@each_position
def test_cached_decoding_equals_recomputation(positions, device):
    model = placed(of_random_weights(positions), device)
    inputs, targets = ids(3, 20), ids(3, 50, seed=1)
    mask = torch.ones(3, 20).long()
    mask[1, 12:] = 0
    with torch.no_grad():
        states = model.encode(inputs, mask)
        whole = model.decode(targets, states, mask)
        cache = model.new_cache()
        pieces = [model.decode(piece, states, mask, cache) for piece in targets.split([1, 1, 7, 1, 40], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-10)


@each_position
def test_positions_matter(positions):
    """Reordered inputs are another input; without positions an encoder couldn't distinguish them."""
    model = of_random_weights(positions)
    inputs, labels = ids(2, 12), ids(2, 10, seed=1)
    assert (losses_of(model, inputs, labels) - losses_of(model, inputs.flip(1), labels)).abs().max() > 1e-2


def test_which_parameters_positions_are():
    default = {name for name, _ in build(tiny()).named_parameters()}
    tables = {f"{stack}.relative_attention_bias.weight" for stack in ("encoder", "decoder")}
    assert tables <= default
    for name, positions in POSITIONS.items():
        model = build(tiny(**positions))
        own = {"relative": tables, "learned": {f"{stack}.learned_positions.weight" for stack in ("encoder", "decoder")}}
        assert {parameter for parameter, _ in model.named_parameters()} == default - tables | own.get(name, set())


@each_position
def test_flops_are_those_of_the_matrices_and_of_attention(positions):
    """By hand: per pair of layers 8 matrices of 64 × 64 and 5 of 64 × 96, an output matrix, pairs of width 64; no
    look-up."""
    inputs, targets = 30, 20
    encoder, decoder = 2 * (4 * 64 * 64 + 3 * 64 * 96), 2 * (6 * 64 * 64 + 3 * 64 * 96) + 500 * 64
    cross = 2 * 2 * 64 * 64  # keys and values of the inputs
    pairs = 2 * (inputs**2 + targets**2 + inputs * targets)
    expected = 6 * ((encoder + cross) * inputs + decoder * targets) + 12 * 64 * pairs
    assert build(tiny(**positions)).flops(Sizes.of_example(inputs, targets)) == expected


LENGTHS = [[(7, 4), (3, 6), (5, 2)], [(12, 9)], [(1, 1), (8, 8)]]  # (inputs, targets) of each example of each row


@pytest.mark.parametrize("settings", [V1_0, *POSITIONS.values()], ids=["v1.0", *POSITIONS])
def test_a_packed_batch_gives_each_example_its_own_losses_and_gradients(settings, device):
    model = placed(of_random_weights({**settings, "z_loss": 1e-3, "label_smoothing": 0.1}).train(), device)
    examples = [
        [(ids(1, i, seed=10 * row + k), ids(1, t, seed=50 + 10 * row + k)) for k, (i, t) in enumerate(lengths)]
        for row, lengths in enumerate(LENGTHS)
    ]
    batch = packed(examples, inputs=17, targets=14)
    together = losses_of(model, **batch)
    weights = torch.rand(together.shape, generator=torch.Generator().manual_seed(0))
    (together * weights).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row, row_examples in enumerate(examples):
        start = 0
        for inputs, labels in row_examples:
            here = slice(start, start + labels.size(1))
            alone = losses_of(model, inputs, labels)
            torch.testing.assert_close(together[row : row + 1, here], alone, rtol=0, atol=1e-10)
            (alone * weights[row : row + 1, here]).sum().backward()
            start = here.stop
        assert together[row, start:].count_nonzero() == 0
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-10 * scale, msg=name)


def packed(examples, inputs, targets):
    """Rows of several examples as `as_batch` returns them: padded, segments from 1, positions within each segment."""
    batch = {}
    for side, name, width in [(0, "encoder", inputs), (1, "decoder", targets)]:
        tokens = torch.zeros(len(examples), width, dtype=torch.long)
        segments, positions = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for row, row_examples in enumerate(examples):
            start = 0
            for number, example in enumerate(row_examples, 1):
                here = slice(start, start + example[side].size(1))
                tokens[row, here], segments[row, here] = example[side][0], number
                positions[row, here] = torch.arange(here.stop - start)
                start = here.stop
        batch |= {f"{name}_segment_ids": segments, f"{name}_positions": positions}
        if name == "encoder":
            batch |= {"encoder_input_ids": tokens, "encoder_attention_mask": (segments > 0).long()}
        else:
            batch["labels"] = tokens.masked_fill(segments == 0, -100)
    return batch


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_modle": 3}, "Extra inputs"),
        ({"d_model": 0}, "greater than 0"),
        ({"dropout_rate": 1.0}, "less than 1"),
        ({"relative_attention_max_distance": 16}, "must exceed half"),
        ({"positions": "absolute"}, "'relative', 'rotary', 'alibi', 'sinusoidal' or 'learned'"),
        ({"positions": "learned"}, "learned positions need max_positions"),
        ({"max_positions": 512}, "for learned positions, not for relative ones"),
        ({"positions": "rotary", "d_kv": 15}, "15 is odd"),
        ({"positions": "alibi", "relative_attention_num_buckets": 16}, "for relative positions, not for alibi ones"),
    ],
)
def test_an_unknown_or_impossible_setting_is_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        tiny(**wrong)


def test_a_sequence_longer_than_learned_positions_is_refused_before_training(small_corpus, tmp_path):
    """The corpus's rows have 32 inputs and, at noise density 0.15 and mean span 3, 8 targets."""
    model = {**tiny(positions="learned", max_positions=31).model_dump(), "vocab_size": None}
    content = {
        "run": {"name": "a", "directory": str(tmp_path / "run"), "max_steps": 1},
        "model": model,
        "data": {"train": [{"corpus": str(small_corpus)}]},
        "batch": {"global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-3},
    }
    with pytest.raises(
        UserError, match=r"sequences of 31 tokens at most, .*/corpus gives up to 32 inputs and 8 targets"
    ):
        validate(RunConfig.model_validate(content), 0, 1)
    content["model"]["max_positions"] = 32
    assert validate(RunConfig.model_validate(content), 0, 1).model.longest_sequence == 32


def test_configs_do_not_import_torch():
    code = "import sys, pretrain.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
