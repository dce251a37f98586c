"""Keys and values of the tokens generated so far, which the hypotheses of an example share."""

from collections.abc import Callable

import torch
from torch import Tensor

from pretrain.models.attention import KeysAndValues, KeyValueCache

PAGE = 32  # steps; storage grows by a page, and what no hypothesis sees any more is dropped then


class PagedCache:
    """Keys and values of all layers of `examples`, each with `width` hypotheses.

    An entry is one token of one hypothesis; it is written once and never moves. A hypothesis that goes on from another
    one shares its entries: a table says which entries each hypothesis sees, and only that table changes. So all
    hypotheses of an example attend to one list of keys, in one product, and nothing is copied for any of them.

    `seen` (examples, width, used): which entries a hypothesis sees. `positions` (examples, used): the position of each.
    """

    def __init__(self, layers: int, examples: int, heads: int, d_kv: int, dtype: torch.dtype, device: torch.device):
        # (layers, keys or values, examples, heads, room, d_kv)
        self._stored = torch.empty(layers, 2, examples, heads, 0, d_kv, dtype=dtype, device=device)
        self.seen = torch.empty(examples, 1, 0, dtype=torch.bool, device=device)
        self.positions = torch.empty(examples, 0, dtype=torch.long, device=device)
        self.all_seen = True
        self._new = 0
        self._diagonal = self.seen  # (examples, width, width): each hypothesis sees its own new entry

    @property
    def used(self) -> int:
        return self.seen.size(2)

    def fill(self, keys_and_values: Tensor, mask: Tensor | None) -> None:
        """Starts with the tokens of a prompt, (layers, 2, examples, heads, length, d_kv); `mask` (examples, length)."""
        examples, length = keys_and_values.size(2), keys_and_values.size(4)
        self._stored = keys_and_values
        self.positions = torch.arange(length, device=self.positions.device).expand(examples, -1)
        self.all_seen = mask is None
        self.seen = torch.ones_like(self.positions, dtype=torch.bool)[:, None] if mask is None else mask[:, None].bool()

    def append(self, position: int) -> None:
        """Makes an entry at position `position` for each hypothesis, which `write` fills in each layer."""
        examples, width, used = self.seen.shape
        if used + width > self._stored.size(4):
            self._new_page()
            used = self.used
        if self._diagonal.shape != (examples, width, width):
            self._diagonal = torch.eye(width, dtype=torch.bool, device=self.seen.device).expand(examples, -1, -1)
        self.seen = torch.cat([self.seen, self._diagonal], dim=2)
        self.positions = torch.cat([self.positions, self.positions.new_full((examples, width), position)], dim=1)
        self.all_seen = self.all_seen and width == 1
        self._new = used

    def layer(self, number: int) -> KeyValueCache:
        """The cache of one layer, whose `update` fills the new entries."""
        return _LayerOfPages(self, number)

    def write(self, layer: int, new: KeysAndValues) -> KeysAndValues:
        """Writes the new entries, (examples, heads, width, d_kv) each; returns all of them, (…, used, d_kv) each."""
        keys, values = self._stored[layer, :, :, :, : self.used].unbind()
        keys[:, :, self._new :], values[:, :, self._new :] = new
        return keys, values

    def branch(self, origin: Tensor) -> None:
        """Hypothesis j of an example now goes on from `origin[example, j]`; (examples, new width)."""
        self.seen = self.seen.gather(1, origin[..., None].expand(-1, -1, self.used))

    def keep(self, examples: Tensor) -> None:
        """Drops all other examples."""
        self._stored = self._stored.index_select(2, examples)
        self.seen, self.positions = self.seen[examples], self.positions[examples]

    def _new_page(self) -> None:
        """Moves the entries that some hypothesis sees to new storage, with room for a page of new ones."""
        old = self._stored[..., : self.used, :]
        if not self.all_seen:
            alive = self.seen.any(dim=1)
            most = int(alive.sum(dim=1).max())
            order = (~alive).long().argsort(dim=1, stable=True)[:, :most]
            old = old.gather(4, order[:, None, :, None].expand(*old.shape[:4], -1, old.size(5)))
            self.seen = self.seen.gather(2, order[:, None].expand(-1, self.seen.size(1), -1))
            self.positions = self.positions.gather(1, order)
        shape = list(old.shape)
        shape[4] += PAGE * self.seen.size(1)
        self._stored = old.new_empty(shape)
        self._stored[..., : old.size(4), :] = old


class _LayerOfPages(KeyValueCache):
    def __init__(self, pages: PagedCache, number: int):
        super().__init__()
        self.pages, self.number = pages, number

    def update(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        return self.pages.write(self.number, project())
