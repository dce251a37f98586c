"""T5Gemma's windows, and what transformers' T5Gemma can't be."""

import torch

from pretrain.models import parse
from pretrain.models.functional.attention_backends import Visibility
from tests.support.small_models import MODELS, VOCABULARY, as_at_the_start
from tests.support.tables import each


@each("family", ["t5gemma", "t5gemma2"])
def test_without_a_window_all_layers_have_full_attention(family):
    """`full_attention_every` and `window_rope_base` have defaults that need a window."""
    given = {name: value for name, value in MODELS[family].items() if name != "full_attention_every"}
    config = parse({**given, "vocab_size": VOCABULARY, "sliding_window": None})
    assert {config.window_and_rotation(layer) for layer in range(6)} == {(None, config.rotation)}
    assert parse(config.model_dump()) == config


@each("window, kinds", [(8, [True, True, True, True]), (7, [False, True, False, True])])
def test_a_causal_window_as_wide_as_the_row_is_no_window(window, kinds):
    decoder = as_at_the_start("t5gemma", sliding_window=window).decoder
    masks = decoder.masks(torch.zeros(1, 8, 32), 8, torch.arange(8), Visibility(causal=True))
    assert [mask.is_causal for mask in masks] == kinds
