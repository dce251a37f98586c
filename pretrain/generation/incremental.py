"""One step of decoding in its fastest form: what the models' `decode` computes for one new token of each hypothesis.

It runs the models' own layers, on a copy whose matrices are packed (`packed_linear`). All hypotheses of an example are
the queries of one row: they share the keys and values of its input and of earlier tokens, which are never copied
(`paged_cache`). The bias of each distance is looked up once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.functional.numerics import soft_capped
from pretrain.generation.packed_linear import PackedLinear, can_pack, packed_linear
from pretrain.generation.paged_cache import PagedCache
from pretrain.models import outline
from pretrain.models.attention import Attention, KeyValueCache, MemoryCache
from pretrain.models.attention_masks import AttentionInputs, AttentionMask
from pretrain.models.decoder_only import DecoderOnly
from pretrain.models.layers import Linear, RMSNorm
from pretrain.models.model import Model
from pretrain.models.stacks import Decoder, EncoderDecoder
from pretrain.models.visibility import Window, masked


class PackedModel:
    """A copy of a model whose decoder has packed matrices. After a training step it is out of date.

    `model`: the copy, in fp32 if it came in bf16 to a CPU without products in bf16. PyTorch emulates these there, which
    takes four times as long as the same products in fp32. Without padding of the vocabulary, which has no logits.
    """

    def __init__(self, model: EncoderDecoder | DecoderOnly):
        first = model.embedding.weight
        slow = first.dtype == torch.bfloat16 and first.device.type == "cpu" and not can_pack(first.dtype)
        state = {name: tensor.float() if slow else tensor for name, tensor in model.state_dict().items()}
        copy: Any = outline(model.config)  # draws nothing
        copy.load_state_dict(state, assign=True)
        self.model = copy.eval()
        module: Any
        for module in copy.decoder.modules():
            module.forward = _fastest(module)
        head, rows = copy.lm_head, model.config.vocab_size
        bias = head.offsets(head.weight)
        self._head: PackedLinear = packed_linear(head.weight[:rows], None if bias is None else bias[:rows])

    @staticmethod
    def of(model: Model) -> "PackedModel | None":
        """None for a model whose decoder has another form, and under ZeRO-3, where ranks hold shards."""
        if isinstance(model, DecoderOnly) or (isinstance(model, EncoderDecoder) and isinstance(model.decoder, Decoder)):
            return PackedModel(model) if all(weight.numel() for weight in model.parameters()) else None
        return None

    def logits(self, x: Tensor) -> Tensor:
        """Maps the decoder's states (hypotheses, d_model) to (hypotheses, vocab_size)."""
        head = self.model.lm_head
        return soft_capped(self._head(head.scaled(self.model.before_head(x))), head.softcap)


def _fastest(module: nn.Module) -> Callable[..., Tensor]:
    """The `forward` of a module whose weights don't change.

    An RMS norm takes four operations instead of eight: x / √(mean x² + ε) = x √d / √(|x|² + d ε).
    """
    if isinstance(module, Linear):
        return packed_linear(module.weight, module.bias)
    if not isinstance(module, RMSNorm) or module.weight.dtype != torch.float32 or module.weight.is_cuda:
        return module.forward
    size = module.weight.numel()
    least = module.weight.new_tensor((size * module.epsilon) ** 0.5)
    gains = module.gains.detach() * size**0.5
    return lambda x: (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(least)).mul_(gains)


class Incremental:
    """The state of a decoder for a batch of examples, each with the same number of hypotheses, at first one.

    `memory`: an encoder's states (examples, length, d_model), of which `memory_mask` hides padding.
    """

    def __init__(
        self, packed: PackedModel, examples: int, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ):
        self.packed, self.decoder = packed, packed.model.decoder
        attention = next(module for module in self.decoder.modules() if isinstance(module, Attention))
        like, heads = packed.model.embedding.weight, attention.k.out_features // attention.d_kv
        layers = len(self.decoder.layers)
        self.cache = PagedCache(layers, examples, heads, attention.d_kv, like.dtype, like.device)
        self.position = 0  # of the next token, counting padding before a prompt
        self.padding: Tensor | None = None  # (examples, 1): tokens of padding before a prompt
        self.like = like[:0]
        self.by_distance = self._diagonals(256)
        self.memory, self.memory_mask = memory, memory_mask
        seen = None if memory_mask is None else memory_mask[:, None, None].bool()
        self.memory_bias = masked(None, seen, like.dtype)
        self.memory_caches: list[KeyValueCache] = [MemoryCache() for _ in range(layers)]

    def read(self, prompts: Tensor, mask: Tensor | None) -> Tensor:
        """Reads the prompts (examples, length) of a decoder without an encoder; returns the next token's logits."""
        model = self.packed.model
        caches: list[KeyValueCache] = model.new_cache()
        states = self.decoder(model.embedding(prompts), model.of_prompt(prompts, mask), caches)
        self.cache.fill(torch.stack([torch.stack(cache.entries) for cache in caches if cache.entries]), mask)
        self.position = prompts.size(1)
        self.padding = None if mask is None else (mask == 0).sum(dim=1, keepdim=True)
        return self.packed.logits(states[:, -1])

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` (hypotheses, 1); returns the logits (hypotheses, vocab_size) of the next ones."""
        self.cache.append(self.position)
        positions = torch.tensor([self.position], device=tokens.device)
        positions = positions if self.padding is None else positions - self.padding
        examples, width = self.cache.seen.shape[:2]
        model = self.packed.model
        embedded = model.embedding if self.memory is None else model.embedded_targets
        x = self.decoder.add_positions(embedded(tokens.view(examples, width)), positions)
        inputs = AttentionInputs(self.memory_mask)
        if self.memory is not None:
            positions = self.decoder.after_inputs(positions, self.memory, inputs)

        def new_mask(window: Window | None, base: float) -> AttentionMask:
            return AttentionMask(self._bias(x.dtype, window), self.decoder.rotary(positions, base, x.dtype))

        masks = self.decoder.layer_masks.for_layers(new_mask, 1, self.position + 1)
        self.position += 1
        if self.memory is None:
            for i, layer in enumerate(self.decoder.layers):
                x = layer(x, masks[i], self.cache.layer(i))
        else:
            cross_mask = AttentionMask(self.memory_bias)
            cross_mask = self.decoder.with_cross_rotation(cross_mask, positions, self.memory, inputs)
            for i, layer in enumerate(self.decoder.layers):
                x = layer(x, self.memory, masks[i], cross_mask, (self.cache.layer(i), self.memory_caches[i]))
        return self.packed.logits(self.decoder.finished(x, positions).flatten(0, 1))

    def branch(self, origin: Tensor) -> None:
        """Hypothesis j of an example goes on from hypothesis `origin[example, j]` of it."""
        self.cache.branch(origin)

    def keep(self, examples: Tensor) -> None:
        """Drops all other examples."""
        self.cache.keep(examples)
        for cache in self.memory_caches:
            cache.select(examples)
        self.memory, self.memory_mask, self.memory_bias, self.padding = (
            None if tensor is None else tensor[examples]
            for tensor in (self.memory, self.memory_mask, self.memory_bias, self.padding)
        )

    def _diagonals(self, distances: int) -> Tensor | None:
        """What the kind of positions adds to a logit, by the distance of the key: (heads, distances); None: nothing."""
        diagonals = self.decoder.diagonals(1, distances, self.like)
        return None if diagonals is None else diagonals.flip(-1)

    def _bias(self, dtype: torch.dtype, window: Window | None) -> Tensor | None:
        """What is added to the logits of self-attention; broadcasts to (examples, heads, width, used)."""
        cache, distances = self.cache, self.by_distance
        if distances is not None and self.position >= distances.size(1):
            distances = self.by_distance = self._diagonals(2 * distances.size(1))
        if cache.all_seen and window is None:
            return None if distances is None else distances[:, : cache.used].flip(-1)[None, :, None]
        away = self.position - cache.positions
        bias = None if distances is None else distances[:, away].transpose(0, 1)[:, :, None]
        seen = cache.seen if window is None else cache.seen & (away <= window.before)[:, None]
        return masked(bias, seen[:, None], dtype)
