"""The command `pretrain adapt`: reads decoders, writes an encoder-decoder, and says what came from where."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from pretrain import huggingface
from pretrain.checkpoint.choose import checkpoint_in
from pretrain.checkpoint.trained import TrainedModel, save_weights
from pretrain.config.models import Heads
from pretrain.huggingface.load import CONFIG
from pretrain.models import DecoderOnlyConfig, ModelConfig
from pretrain.tools.adapt.target_config import STYLES, target
from pretrain.tools.adapt.weight_origins import Adapted, Origin, State, adapted


@dataclass(frozen=True)
class Source:
    """A decoder: its config, its `state_dict()` in fp32 and its tokenizer."""

    config: DecoderOnlyConfig
    state: State
    tokenizer: Tokenizer


def adapt(
    decoder: Path, out: Path, style: str, encoder: Path | None = None, sentinels: int | None = None, seed: int = 0
) -> list[str]:
    """Writes the checkpoint `out` of step 0; returns the lines that say what was copied, and what is new.

    `decoder` and `encoder` are directories that transformers saved, our checkpoints or runs. `sentinels`: how many
    the tokenizer gets, for objectives that need them; None: as many as it has. `seed` draws new weights.
    """
    if style not in STYLES:
        raise UserError(f"--style: expected {', '.join(STYLES)}, got {style!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; choose another directory")
    source = read(decoder)
    encoder_source = read(encoder) if encoder else source
    if _ids(encoder_source.tokenizer) != _ids(source.tokenizer):
        raise UserError(f"--encoder: {encoder} has another tokenizer than {decoder}")
    tokenizer = _with_sentinels(source.tokenizer, sentinels)
    try:
        config = target(
            style, source.config, encoder_source.config if encoder else None, tokenizer.vocabulary.start
        ).model_copy(update={"vocab_size": tokenizer.size})
    except UserError as error:
        raise UserError(f"{decoder}: {error}") from None
    result = adapted(config, encoder_source.state, source.state, crosses_like_self(config), seed)
    save_weights(config, result.state, tokenizer, out)
    return table(result, {"decoder": decoder, "encoder": encoder or decoder})


def read(path: Path) -> Source:
    """Raises UserError unless there is a decoder_only model at `path`, FailedError if files are damaged."""
    config: ModelConfig
    if (path / CONFIG).exists():
        config, state, tokenizer = huggingface.read(path)
    else:
        trained = TrainedModel.open(checkpoint_in(path))
        config, state, tokenizer = trained.model.config, trained.model.state_dict(), trained.tokenizer
    if not isinstance(config, DecoderOnlyConfig):
        raise UserError(f"{path}: a model of the family {config.family}; expected a decoder_only model")
    return Source(config, state, tokenizer)


def crosses_like_self(config: ModelConfig) -> bool:
    """True if cross-attention has the shapes of self-attention: the stacks are equally wide."""
    stacks = [getattr(config, name, None) for name in ("encoder", "decoder")]
    widths = {stack.d_model for stack in stacks if isinstance(stack, Heads)}
    return len(widths) <= 1


def _ids(tokenizer: Tokenizer) -> tuple[object, ...]:
    return tokenizer.sha256, tokenizer.special_tokens, tokenizer.sentinels


def _with_sentinels(tokenizer: Tokenizer, sentinels: int | None) -> Tokenizer:
    if sentinels is None:
        return tokenizer
    if tokenizer.sentinels not in (0, sentinels):
        raise UserError(f"--sentinels: the tokenizer has {tokenizer.sentinels}, whose ids another number would move")
    return Tokenizer(tokenizer.model, tokenizer.special_tokens, sentinels)


def table(result: Adapted, paths: dict[str, Path]) -> list[str]:
    """One line for each group of parameters with one origin, then the sums. `paths`: the decoders, by the stacks that
    they became."""

    def origin(one: Origin) -> str:
        return f"{_group(one.name.removeprefix('decoder.'))} of {paths[one.stack]}"

    rows: Counter[tuple[str, str]] = Counter()
    for name, found in result.origins.items():
        size = result.state[name].numel()
        new = size if found is None else result.new.get(name, 0)
        if found is not None:
            rows[_group(name), origin(found)] += size - new
        if new:
            rows[_group(name), _NEW] += new
    new = sum(size for (_, source), size in rows.items() if source == _NEW)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{part:{widths[0]}}  {source:{widths[1]}}  {size:>15,}" for (part, source), size in rows.items()]
    lines.append(f"{rows.total() - new:,} parameters copied, {new:,} new")
    unused: Counter[str] = Counter()
    for one, size in result.unused.items():
        unused[origin(one)] += size
    return [*lines, *(f"not used: {source}, {size:,} parameters" for source, size in unused.items())]


def _group(name: str) -> str:
    """The part that a parameter belongs to, with its norms.

    decoder.layers.3.cross_attention_norm.weight → decoder cross_attention
    """
    found = _NAME.fullmatch(name)
    assert found is not None, name
    stack, sublayer, other = found.groups()
    return " ".join(part for part in (stack, sublayer or other) if part)


_NAME = re.compile(
    r"(?:(encoder|decoder)\.)?(?:layers\.\d+\.)?(?:((?:self_|cross_)?attention|feed_forward)(?:_norm(?:_after)?)?|(\w+))\..*"
)
_NEW = "new"
