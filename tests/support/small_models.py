"""A small model of each family, and of each variant that has a mechanism of its own, with batches for them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from data_pipeline.corpus.objectives.objective import Examples, Padded
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch, as_batch
from pretrain.models import build, parse
from pretrain.models.encoder_only import EncoderOnly
from pretrain.models.model import Model, shift_right
from pretrain.models.stacks import EncoderDecoder
from tests.support.exported import randomise

VOCABULARY = 300
WIDTHS = {"d_model": 32, "d_ff": 48, "num_heads": 4}
STACKS = {**WIDTHS, "num_encoder_layers": 2, "num_decoder_layers": 2}
LEARNED = {"max_positions": 64}
ROTARY = {"positions": "rotary"}
T5 = {"family": "t5", **STACKS, "d_kv": 8}
STACK = {**WIDTHS, "num_layers": 4, "num_key_value_heads": 2}
WIDER = {**WIDTHS, "d_model": 48, "num_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 24}
# Windows of 4 and 5 tokens: most rows of the tests are longer.
T5GEMMA = {"family": "t5gemma", "attention_softcap": 5.0, "output_softcap": 3.0, "encoder": STACK, "decoder": STACK}
MODERN = {"family": "modern", "encoder": STACK, "decoder": STACK}
STACKS_OF_TODAY: dict[str, dict[str, Any]] = {
    "t5gemma": {**T5GEMMA, "sliding_window": 5},
    "t5gemma, unbalanced": {**T5GEMMA, "encoder": WIDER, "sliding_window": 4},
    "t5gemma2": {"family": "t5gemma2", **STACK, "sliding_window": 5, "full_attention_every": 3},
    "modern": MODERN,
    "modern, local and global": MODERN
    | {"encoder": WIDER, "tie_embeddings": "output", "attention_softcap": 5.0, "scale_embedding": True}
    | {"sliding_window": 4, "full_attention_every": 3, "window_rope_base": 1e3, "rope_base": 1e5, "rope_factor": 2.0}
    | {"norm": "rms_around_one", "norm_after": True, "activation": "geglu"},
    "modern, plain": MODERN
    | {"decoder": WIDER, "tie_embeddings": "none", "cross_rotation": False, "qk_norm": False, "biases": True}
    | {"positions": "learned", **LEARNED, "norm": "layer", "layer_norm_epsilon": 1e-3, "activation": "gelu"}
    | {"output_softcap": 3.0},
}
DECODER = {"family": "decoder_only", **WIDTHS, "num_layers": 2}
LLAMA = {**DECODER, **ROTARY, "num_key_value_heads": 2, "norm": "rms", "activation": "swiglu", "biases": False}
GEMMA = {**LLAMA, "norm": "rms_around_one", "norm_after": True, "activation": "geglu", "scale_embedding": True}
LOCAL = {"sliding_window": 4, "full_attention_every": 2}
CAPS = {"attention_softcap": 5.0, "output_softcap": 3.0}
AUTOREGRESSIVE = {"family": "autoregressive", **STACKS}
# Every option of the autoregressive model is on in one of them, in combinations that differ as much as possible.
AUTOREGRESSIVE_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": LEARNED,
    "best": {**LEARNED, "subtract_positions": "without_norm", "embedding_loss": {"kind": "mse", "coefficient": 8.0}},
    "alternate": {
        **LEARNED,
        "order": "alternate",
        "subtract_positions": "with_norm",
        "add_positions": True,
        "bias": True,
    },
    "bridge norm": {**LEARNED, "bridge_norm": True, "add_positions": True, "embedding_loss": {"kind": "cosine"}},
    "cross bias": {**LEARNED, "cross_attention_bias": True, "num_cross_heads": 2, "subtract_positions": "without_norm"},
    "rotary": {**ROTARY, "num_cross_heads": 2, "embedding_loss": {"kind": "mse"}},
    "rotary, alternate": {**ROTARY, "num_cross_heads": 1, "order": "alternate"},
    "rotary, subtracted": {
        **ROTARY,
        **LEARNED,
        "num_cross_heads": 2,
        "add_positions": True,
        "subtract_positions": "without_norm",
        "embedding_loss": {"kind": "kl", "aggregation": "convolution", "kernel_size": 3},
    },
    "matrix": {**LEARNED, "embedding_loss": {"kind": "contrastive", "aggregation": "matrix"}},
}
BERT = {"family": "encoder_only", **WIDTHS, "num_layers": 2, **LEARNED}

ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "t5, tied": {**T5, "feed_forward": "relu", "tie_embeddings": True},
    **{f"t5, {kind}": {**T5, "positions": kind} for kind in ("rotary", "alibi", "sinusoidal")},
    "t5, in every layer": {**T5, "relative_attention_in_every_layer": True, "num_decoder_layers": 3},
    "t5, learned": {**T5, "positions": "learned", **LEARNED},
    "bart": {"family": "bart", **STACKS, **LEARNED},
    "vanilla": {"family": "vanilla", **STACKS, "label_smoothing": 0.0},
    **STACKS_OF_TODAY,
}
DECODERS: dict[str, dict[str, Any]] = {
    "decoder_only": {**DECODER, **LEARNED},
    **{f"decoder_only, {kind}": {**DECODER, "positions": kind} for kind in ("rotary", "alibi", "sinusoidal")},
    "decoder_only, subtracted": {**DECODER, **LEARNED, "subtract_positions": "without_norm"},
    "decoder_only, subtracted, with norm": {**DECODER, **LEARNED, "subtract_positions": "with_norm"},
    "llama": {**LLAMA, "tie_embeddings": False, "rope_base": 5e5},
    "gemma 2": {**GEMMA, **LOCAL, **CAPS, "head_dim": 12},
    "gemma 3": {**GEMMA, **LOCAL, "qk_norm": True, "window_rope_base": 1e3},
    **{f"autoregressive, {name}": {**AUTOREGRESSIVE, **given} for name, given in AUTOREGRESSIVE_VARIANTS.items()},
}
DOUBLE_DECODER = {"family": "double_decoder", **STACKS}
ENCODERS = {"bert": BERT, "roberta": {**BERT, "num_token_types": 0}}
MODELS = {**ENCODER_DECODERS, **DECODERS, "double_decoder": DOUBLE_DECODER, **ENCODERS}
ONE_OF_EACH_FAMILY = list({settings["family"]: name for name, settings in reversed(MODELS.items())}.values())[::-1]


def as_at_the_start(name: str, **changes: Any) -> Model:
    torch.manual_seed(0)
    return build(parse({"vocab_size": VOCABULARY, "dropout_rate": 0.0, **MODELS[name], **changes})).eval()


def made(name: str, **changes: Any) -> Model:
    """A model in fp64 in which every weight matters, so that equal values agree to many digits."""
    model: Model = randomise(as_at_the_start(name, **changes), std=0.2).double()
    return model


def ids(*shape: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(5, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def masked_lm_logits(model: EncoderOnly, states: Tensor) -> Tensor:
    """Maps states (…, d_model) to logits (…, padded_vocab_size), on the device of `states`."""
    logits: Tensor = model.lm_head(model.masked_lm(states.to(model.lm_head.weight.device)))
    return logits.to(states.device)


def logits_of(
    model: Any, inputs: Tensor, labels: Tensor, mask: Tensor | None = None, token_types: Tensor | None = None
) -> Tensor:
    """What the model predicts `labels` from."""
    if isinstance(model, EncoderDecoder):
        read = shift_right(labels, model.config.decoder_start_id, pad_id=model.config.pad_id)
        return model.decode(read, model.encode(inputs, mask), mask)
    if isinstance(model, EncoderOnly):
        return masked_lm_logits(model, model.encode(inputs, mask, token_types))
    logits: Tensor = model.decode(inputs, attention_mask=mask)
    return logits


Example = tuple[Tensor, Tensor]  # inputs and labels, (1, length) each


def examples_of(model: Model, lengths: list[list[tuple[int, int]]]) -> list[list[Example]]:
    """Examples with so many inputs and targets; a stack alone has as many targets as inputs."""
    two = isinstance(model, EncoderDecoder)
    return [
        [
            (ids(1, inputs, seed=10 * row + k), ids(1, targets if two else inputs, seed=50 + 10 * row + k))
            for k, (inputs, targets) in enumerate(of_row)
        ]
        for row, of_row in enumerate(lengths)
    ]


def packed(rows: list[list[Example]], padding: int = 2) -> Batch:
    """Rows of several examples as a loader gives them."""
    sides, segments = [], []
    for side in range(2):
        sizes = [[example[side].size(1) for example in row] for row in rows]
        lengths = np.array([sum(of_row) for of_row in sizes])
        values, numbers = np.zeros((2, len(rows), lengths.max() + padding), dtype=np.int64)
        for row, (examples, of_row, length) in enumerate(zip(rows, sizes, lengths, strict=True)):
            values[row, :length] = torch.cat([example[side] for example in examples], dim=1)
            numbers[row, :length] = np.repeat(np.arange(len(of_row)) + 1, of_row)
        sides.append(Padded(values, lengths))
        segments.append(numbers)
    return as_batch(Examples(*sides, input_segments=segments[0], target_segments=segments[1]), pad=0)


def padded_rows(model: Model, *lengths: tuple[int, int]) -> Batch:
    """A batch of rows of these numbers of inputs and targets, padded as the loader does it."""
    batch = packed(examples_of(model, [[one] for one in lengths]), padding=0)
    batch = {name: tensor for name, tensor in batch.items() if not name.endswith(("segment_ids", "positions"))}
    if isinstance(model, EncoderOnly):
        batch["labels"][:, ::3] = IGNORE_INDEX
    return batch


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


_CALLED = ("forward", "encode", "decode")  # what tests call; other methods stay on the device


def placed(model: Model, device: str) -> Model:
    """Moves `model` to `device`. Its methods take tensors on the CPU, where tests make and compare them, and return
    such; nothing is moved inside them."""
    if device == "cpu":
        return model
    model.to(device)
    depth = 0

    def moving(method: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            if depth:
                return method(*arguments, **options)
            arguments, options = tree_map_only(Tensor, lambda tensor: tensor.to(device), (arguments, options))
            depth += 1
            try:
                results = method(*arguments, **options)
            finally:
                depth -= 1
            return tree_map_only(Tensor, lambda tensor: tensor.cpu(), results)

        return moved

    for name in _CALLED:
        if hasattr(model, name):
            setattr(model, name, moving(getattr(model, name)))
    return model
