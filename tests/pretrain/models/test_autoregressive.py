"""The autoregressive encoder-decoder besides its logits, which test_import_yan.py compares, and drawn boundaries."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.config.models import EmbeddingLossConfig
from pretrain.models.autoregressive import CausalConvolution, EmbeddingLoss, PositionMatrix, RunningMean
from tests.support.exported import randomise
from tests.support.rank_processes import each as each_on_ranks
from tests.support.rank_processes import on_ranks
from tests.support.small_models import AUTOREGRESSIVE_VARIANTS, MODELS, ids, made
from tests.support.small_runs import engine_of, micro_batches, row_offsets, run_config
from tests.support.tables import each

# The embedding loss


def defined(settings, embeddings, encoder_out, weights):
    """The loss of one row by its definition, position by position."""

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        y = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights.get(f"{name}.weight", 1.0)
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    embeddings = embeddings.detach() if settings.detach == "embedding" else embeddings
    encoder_out = encoder_out.detach() if settings.detach == "encoder_out" else encoder_out
    if settings.embedding_norm == "before_mean":
        embeddings = norm("embedding_norm", embeddings)
    outputs = norm("encoder_norm", encoder_out) if settings.encoder_norm else encoder_out
    table = weights.get("aggregation.weight")
    distances = []
    for t, out in enumerate(outputs):
        if settings.aggregation == "mean":
            aggregate = sum(embeddings[: t + 1]) / (t + 1)
        elif settings.aggregation == "matrix":
            aggregate = sum(table[t, s] * embeddings[s] for s in range(t + 1))
        else:
            aggregate = sum(table[back] * embeddings[t - back] for back in range(min(len(table), t + 1)))
        if settings.embedding_norm == "after_mean":
            aggregate = norm("embedding_norm", aggregate)
        cosines = [aggregate @ one / (aggregate @ aggregate).sqrt() / (one @ one).sqrt() for one in outputs[: t + 1]]
        shares, others = (one.exp() / one.exp().sum() for one in (aggregate, out))
        distances.append(
            {
                "mse": ((aggregate - out) ** 2).sum() / len(out),
                "l1": (aggregate - out).abs().sum() / len(out),
                "cosine": 1 - (cosines[t] + 1) / 2,
                "log_cosine": -((cosines[t] + 1) / 2).log(),
                "kl": (shares * (shares / others).log()).sum(),
                "contrastive": sum((10 * (one - cosines[t])).exp() for one in cosines).log(),
            }[settings.kind]
        )
    return sum(distances) / len(distances)


NORMS = {"embedding_norm": ["before_mean", "after_mean", "none"], "encoder_norm": [True, False]}
NORMS |= {"learned_norms": [True, False], "detach": ["encoder_out", "embedding", "none"]}
KERNELS = {"mean": None, "convolution": 3, "matrix": None}
LOSSES = [
    *({"kind": kind, "coefficient": 1.5, **dict(zip(NORMS, values, strict=True))}
      for kind, *values in product(["mse", "cosine", "log_cosine"], *NORMS.values())),
    *({"kind": kind, "detach": "none", "aggregation": aggregation, "kernel_size": size}
      for kind, (aggregation, size) in product(["l1", "kl", "contrastive", "mse", "cosine"], KERNELS.items())),
]  # fmt: skip


@each("loss", LOSSES)
def test_the_embedding_loss_is_as_defined(loss):
    """And its gradients, for two rows. Those of what is detached are None."""
    settings = EmbeddingLossConfig(**loss)
    subject = randomise(EmbeddingLoss(settings, 8, 12), std=0.4).double()
    inputs = [torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = dict(subject.named_parameters())
    found = subject(*inputs, None).mean()
    expected = sum(defined(settings, *row, weights) for row in zip(*inputs, strict=True)) / 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    of_both = [torch.autograd.grad(one, [*inputs, *weights.values()], allow_unused=True) for one in (found, expected)]
    for ours, theirs in zip(*of_both, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@each("name", [name for name, given in AUTOREGRESSIVE_VARIANTS.items() if "embedding_loss" in given])
def test_a_model_compares_its_embeddings_with_its_encoders_output_in_training_alone(name):
    model, seen = made(f"autoregressive, {name}").train(), []
    model.encoder[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.encoder[-1].register_forward_hook(lambda _, given, output: seen.append(output))
    found = model(ids(2, 6), ids(2, 6, seed=1))["embedding_loss"]
    expected = model.config.embedding_loss.coefficient * model.embedding_loss(*seen, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert model.eval()(ids(2, 6), ids(2, 6, seed=1)).keys() == {"labels"}


# What each position sees.


def test_positions_of_segments_count_anew_where_none_are_given():
    model = made("autoregressive, best").train()
    batch = {"encoder_input_ids": ids(1, 6), "labels": ids(1, 6, seed=1)}
    batch["encoder_segment_ids"] = torch.tensor([[1, 1, 1, 2, 2, 0]])
    counted, given = model(**batch), model(**batch, encoder_positions=torch.tensor([[0, 1, 2, 0, 1, 0]]))
    assert torch.equal(counted["labels"], given["labels"])
    assert torch.equal(counted["embedding_loss"], given["embedding_loss"])


@each("kind, sizes, expected", [(RunningMean, (), [2, 3, 6, 8]), (PositionMatrix, (4, 4), [2, 3, 6, 8]),
                                (CausalConvolution, (2, 1), [1, 3, 3, 8])])  # fmt: skip
def test_aggregations_start_as_means_and_begin_anew_in_each_segment(kind, sizes, expected):
    segments = torch.tensor([[1, 1, 2, 2]])
    seen = (segments[:, None] == segments[..., None]).tril()
    assert kind(*sizes)(torch.tensor([[[2.0], [4.0], [6.0], [10.0]]]), seen).flatten().tolist() == expected


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="13 tokens exceed the model's 12 learned positions"):
        made("autoregressive, plain", max_positions=12).decode(ids(1, 13))
    made("autoregressive, rotary").decode(ids(1, 73))


# A family that draws for each step: examples/double_decoder, whose tests have the rest


NAME = "double_decoder"


def losses_of_steps(stage, micro_batch):
    config = run_config(stage, {**MODELS[NAME], "vocab_size": 100})
    layout = BatchLayout(dist.get_rank(), dist.get_world_size(), micro_batch, 8 // dist.get_world_size() // micro_batch)
    engine = engine_of(config)
    return [engine.step(step, row_offsets(layout, step), micro_batches(layout, step, 16, 16)).loss for step in range(4)]


@pytest.mark.slow
def test_every_zero_stage_and_micro_batch_has_the_same_boundaries():
    """Losses, half of them of rows of two lengths. Other boundaries would change them by more."""
    first, *others = on_ranks(2, each_on_ranks, losses_of_steps, [(1, 2), (2, 4), (3, 2)])[0]
    assert all(other == pytest.approx(first, abs=1e-6) for other in others)
