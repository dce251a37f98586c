"""The hook `attention`: pictures of the attention weights of each layer and head."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from diagnostics.settings import AttentionSettings
from pretrain.evaluate.hook import EvalResult, Evaluation
from pretrain.evaluate.record import new_figure
from pretrain.models.attention import Attention
from pretrain.models.model import Model, shift_right

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = 1.1  # minimum size of a panel
_INCHES_PER_TOKEN = 0.14


class Pattern(NamedTuple):
    """The attention weights of one kind ("encoder", "decoder", "cross") in all layers.

    Attributes:
        weights: (layers, heads, queries, keys), fp32.
        queries: the tokens of the query axis.
        keys: the tokens of the key axis.
    """

    weights: Tensor
    queries: list[str]
    keys: list[str]


class AttentionPictures:
    """An image `attention/CORPUS/KIND` of the first held-out row of each corpus, with one panel for each layer and
    head."""

    def __init__(self, settings: AttentionSettings):
        self._settings = settings

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        held_out = evaluation.held_out
        images: dict[str, Figure] = {}
        for name, corpus in held_out.corpora.items():
            row = {key: values[:1] for key, values in next(evaluation.batches(corpus)).items()}
            with evaluation.whole_model() as model:
                if held_out.layout.rank == 0:
                    with evaluation.collectives.shield():  # the block restores the model's `record`
                        patterns = attention_patterns(model, row, held_out.tokenizer, self._settings.tokens)
                    title = f"{name}, step {evaluation.step}"
                    images |= {
                        f"attention/{name}/{kind}": attention_figure(one, f"{kind}: {title}")
                        for kind, one in patterns.items()
                    }
        return EvalResult(images=images)


def attention_patterns(model: Model, row: Batch, tokenizer: Tokenizer, most: int) -> Mapping[str, Pattern]:
    """The attention of `model` on a batch of one row, by kind, cut to the first `most` queries and keys."""
    device = next(model.parameters()).device
    with recording_weights(model) as recorded:
        model(**{name: values.to(device) for name, values in row.items()})
    inputs = row["encoder_input_ids"][0]
    if "encoder_attention_mask" in row:
        inputs = inputs[row["encoder_attention_mask"][0] != 0]
    targets = inputs
    if model.decoder_reads_targets:
        labels = row["labels"]
        targets = shift_right(labels, model.config.decoder_start_id)[0][labels[0] != IGNORE_INDEX]
    ids = {"encoder": (inputs, inputs), "decoder": (targets, targets), "cross": (targets, inputs)}
    by_kind: dict[str, list[Tensor]] = {kind: [] for kind in ids}
    for name, weights in recorded:
        kind = _kind(name)
        own = weights.size(2)
        merged = kind == "decoder" and weights.size(3) > own
        by_kind[kind].append(weights[..., :own] if merged else weights)
        if merged:  # attention to the targets and to the input at once: T5Gemma 2's
            by_kind["cross"].append(weights[..., own:])
    patterns = {}
    for kind, (queries, keys) in ids.items():
        if layers := by_kind[kind]:
            queries, keys = queries[:most], keys[:most]
            weights = torch.stack([one[0][:, : len(queries), : len(keys)] for one in layers]).float().cpu()
            patterns[kind] = Pattern(weights, tokens(tokenizer, queries), tokens(tokenizer, keys))
    return patterns


def tokens(tokenizer: Tokenizer, ids: Tensor) -> list[str]:
    """Each of `ids` (n,) as text; a dot for an id without text."""
    return [tokenizer.decode([id_]).strip() or "·" for id_ in ids.tolist()]


@contextlib.contextmanager
def recording_weights(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Within the block, each attention layer of `model` that is called appends its name and its weights (batch, heads,
    queries, keys)."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    found: list[tuple[str, Tensor]] = []
    try:
        for name, layer in layers.items():
            layer.record = lambda weights, name=name: found.append((name, weights))
        yield found
    finally:
        for layer in layers.values():
            layer.record = None


def _kind(name: str) -> str:
    """The kind of an attention layer: "decoder.layers.0.cross_attention" -> "cross"."""
    if "cross_attention" in name:
        return "cross"
    return "encoder" if name.startswith("encoder") else "decoder"


def attention_figure(pattern: Pattern, title: str) -> "Figure":
    """A panel for each layer (row) and head (column), darker where a weight is larger; tokens on the outer axes.

    Black is the panel's largest weight, which the title says: in early training all weights are small.
    """
    layers, heads, queries, keys = pattern.weights.shape
    width, height = (max(_INCHES, _INCHES_PER_TOKEN * count) for count in (keys, queries))
    figure = new_figure(min(width * heads + 1.5, 40), min(height * layers + 1.5, 40))
    figure.suptitle(title)
    panels = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for layer in range(layers):
        for head in range(heads):
            axes, weights = panels[layer, head], pattern.weights[layer, head]
            axes.imshow(weights, cmap="Greys", vmin=0, aspect="auto")
            axes.set_title(f"layer {layer}, head {head}: up to {weights.max():.2f}", fontsize=6, pad=2)
            axes.set_xticks(range(keys), plain(pattern.keys), rotation=90, fontsize=6)
            axes.set_yticks(range(queries), plain(pattern.queries), fontsize=6)
    return figure


def plain(words: Sequence[str]) -> list[str]:
    """`words` with dollar signs escaped: in matplotlib a dollar sign begins a formula."""
    return [word.replace("$", r"\$") for word in words]
