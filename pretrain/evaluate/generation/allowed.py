"""Constrains generated texts to a list of allowed outputs, by a trie of their ids."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.base import arguments
from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.evaluate.generation.settings import GenerationSettings


class Trie:
    """The trie of some rows of ids. Each row ends with EOS, so no row is the beginning of another.

    Node 0 is the root, and edge e leads to node e + 1. An edge is the number `node · vocab_size + id`. Nodes are
    numbered level by level, so the edges are sorted, and the edges of a node are neighbours. The last node has no
    edges: a hypothesis is at this node after an id that isn't allowed.
    """

    def __init__(self, edges: Tensor, vocab_size: int, longest: int):
        self._edges, self._vocab_size = edges, vocab_size
        self.longest = longest  # ids of a row, with EOS
        nodes = torch.arange(len(edges) + 3, device=edges.device)
        self._first = torch.searchsorted(edges, nodes * vocab_size)  # edge of each node

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], vocab_size: int) -> tuple["Trie", np.ndarray]:
        """The trie of `rows`, and the node (rows,) where each row ends; equal rows end at the same node."""
        lengths = np.array([len(row) for row in rows])
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        begins = np.cumsum(lengths) - lengths
        nodes = np.zeros(len(rows), dtype=np.int64)
        levels: list[np.ndarray] = []
        count = 0
        for depth in range(int(lengths.max())):
            some = np.flatnonzero(lengths > depth)
            edges, number = np.unique(nodes[some] * vocab_size + ids[begins[some] + depth], return_inverse=True)
            nodes[some] = count + number + 1
            count += len(edges)
            levels.append(edges)
        return cls(torch.from_numpy(np.concatenate(levels)), vocab_size, int(lengths.max())), nodes

    def to(self, device: torch.device) -> "Trie":
        """The same trie on `device`."""
        return self if self._edges.device == device else Trie(self._edges.to(device), self._vocab_size, self.longest)

    def only(self, scores: Tensor, nodes: Tensor) -> Tensor:
        """`scores` (rows, vocabulary) with −∞ for ids that don't follow the node (rows,) of their row. Rows at the end
        of the trie stay as they are."""
        first = self._first[nodes]
        counts = self._first[nodes + 1] - first
        rows = torch.arange(len(nodes), device=nodes.device).repeat_interleave(counts)
        within = torch.arange(len(rows), device=nodes.device) - (counts.cumsum(0) - counts)[rows]
        forbidden = (counts > 0)[:, None].repeat(1, scores.size(1))
        forbidden[rows, self._edges[first[rows] + within] % self._vocab_size] = False
        return scores.masked_fill(forbidden, -torch.inf)

    def after(self, nodes: Tensor, ids: Tensor) -> Tensor:
        """The nodes (rows,) after `ids` (rows,); the last node for an id that doesn't follow."""
        edges = nodes * self._vocab_size + ids
        found = torch.searchsorted(self._edges, edges).clamp(max=len(self._edges) - 1)
        return torch.where(self._edges[found] == edges, found + 1, len(self._edges) + 1)

    def check(self, settings: GenerationSettings) -> None:
        """Raises UserError if `settings` would forbid an output."""
        if settings.min_new_tokens or settings.no_repeat_ngram_size:
            raise UserError("allowed: min_new_tokens and no_repeat_ngram_size would forbid outputs; set them to 0")
        if self.longest > settings.max_new_tokens:
            longest = f"the longest output has {self.longest} tokens with EOS"
            raise UserError(f"allowed: {longest}, more than max_new_tokens, {settings.max_new_tokens}")


class AllowedOutputs:
    """The only outputs that a model may generate. `outputs`: texts or lists of ids without EOS. `begin`: the ids before
    each output, such as BART's BOS.

    Attributes:
        trie: the trie of the outputs' ids.
        number: the number of different outputs.
    """

    def __init__(self, outputs: Sequence[str | Sequence[int]], tokenizer: Tokenizer, begin: Sequence[int] = ()):
        """Raises UserError for ids that the tokenizer lacks, and if there is no output."""
        if not outputs:
            raise UserError("allowed: has no output")
        vocabulary = tokenizer.vocabulary
        encoded = iter(tokenizer.encode([one for one in outputs if isinstance(one, str)]))
        rows = [
            next(encoded) if isinstance(one, str) else _checked(one, number, tokenizer)
            for number, one in enumerate(outputs, 1)
        ]
        self.trie, nodes = Trie.of([[*begin, *row, vocabulary.eos] for row in rows], tokenizer.size)
        ends, firsts = np.unique(nodes, return_index=True)
        self._output_at = dict(zip(ends.tolist(), firsts.tolist(), strict=True))
        self._outputs, self._tokenizer = outputs, tokenizer
        self.number = len(ends)

    @property
    def checksum(self) -> str:
        """A checksum of the outputs."""
        return fingerprint(list(self._outputs))

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer, begin: Sequence[int] = ()) -> "AllowedOutputs":
        """The outputs in the lines of a file: texts or, in a file whose name ends with .jsonl, JSON strings and lists
        of ids. Raises UserError for a file that can't be read, and for a line that is no output."""
        outputs: list[str | list[int]] = []
        for number, line in enumerate(arguments.lines_of(path), 1):
            try:
                output = json.loads(line) if path.suffix == ".jsonl" else line
            except json.JSONDecodeError:
                output = None
            if not output or not (isinstance(output, str) or _is_ids(output)):
                expected = "a JSON string or a list of ids" if path.suffix == ".jsonl" else "a text"
                raise UserError(f"{path}: line {number}: expected {expected}, got {line!r}")
            outputs.append(output)
        try:
            return cls(outputs, tokenizer, begin)
        except UserError as error:
            raise UserError(f"{path}: {str(error).removeprefix('allowed: ')}") from None

    def output(self, ids: Sequence[int]) -> str | None:
        """The output with these `ids`, which end with EOS, as it was given; a list of ids is decoded. None: not an
        output."""
        node = torch.zeros(1, dtype=torch.long)
        for id_ in ids:
            node = self.trie.after(node, torch.tensor([id_]))
        number = self._output_at.get(int(node))
        if number is None:
            return None
        found = self._outputs[number]
        return found if isinstance(found, str) else self._tokenizer.decode(found)


def _is_ids(output: object) -> bool:
    return isinstance(output, list) and all(type(one) is int for one in output)


def _checked(ids: Any, number: int, tokenizer: Tokenizer) -> list[int]:
    """The ids of an output. Raises UserError unless the tokenizer has them and none is EOS."""
    try:
        found = arguments.token_ids(ids, tokenizer.size)
    except UserError as error:
        raise UserError(f"allowed: output {number}: {error}") from None
    if tokenizer.vocabulary.eos in found:
        raise UserError(f"allowed: output {number}: EOS, {tokenizer.vocabulary.eos}, is added; leave it out")
    return found
