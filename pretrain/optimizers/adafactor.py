"""Adafactor (Shazeer and Stern 2018) as T5 was trained with it (Raffel et al. 2020, section 3.1.2)."""

import itertools
from typing import Any

import torch
from torch import Tensor

from data_pipeline.foundation.errors import FailedError
from pretrain.optimizers.config import AdafactorConfig
from pretrain.optimizers.flat import Flat
from pretrain.optimizers.sharded import Sharded, root_mean_squares, subtract, sums_of_squares


class Adafactor(Sharded):
    """Step t with gradient g, for each tensor p; all means are over the whole tensor (algorithms 4 and 5):

        V ← V + t^−decay_rate · (g² + ε₁ − V); for a matrix, only the means of its rows R and of its columns C
        U = g / √V; for a matrix, V is approximated by R Cᵀ / mean(R)
        p ← (1 − rate · decay) p − rate · max(ε₂, RMS(p)) · U / max(1, RMS(U) / clipping_threshold)

    Every rank holds the means of all tensors in its flats: they are small.
    """

    def __init__(self, groups: list[dict[str, Any]], config: AdafactorConfig):
        super().__init__(groups, config)
        self.config = config
        self._moments: dict[int, _SecondMoments] = {}

    def update(self, flat: Flat, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any) -> None:
        config, moments = self.config, self._moments_of(flat)
        if not state:
            state["step"] = torch.zeros((), device=values.device)
        state["step"] += 1
        step = state["step"].double()
        squares = sums_of_squares(flat, values)
        sums = self.summed(torch.cat([squares.float(), moments.sums(gradient)]))
        parameters = len(flat.fragments)
        moments.add(sums[parameters:], step**-config.decay_rate, config.eps[0])
        update = moments.normalized(gradient)
        factors = torch.full_like(squares, group["lr"])
        if config.multiply_by_parameter_scale:
            factors *= root_mean_squares(flat, sums[:parameters].double()).clamp(min=config.eps[1])
        if config.clipping_threshold is not None:
            sizes = root_mean_squares(flat, self.summed(sums_of_squares(flat, update)))
            factors /= (sizes / config.clipping_threshold).clamp(min=1.0)
        if group["weight_decay"]:
            values.mul_(1 - group["lr"] * group["weight_decay"])
        subtract(flat, lambda span: span.of(update), values, factors)

    def factored_state(self) -> dict[str, dict[str, Tensor]]:
        return {name: parts for moments in self._moments.values() for name, parts in moments.by_name().items()}

    def set_factored_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        for flat in self._flats.values():
            for name, parts in self._moments_of(flat).by_name().items():
                found = state.get(name, {})
                for part, values in parts.items():
                    if part not in found or found[part].shape != values.shape:
                        raise FailedError(f"the checkpoint has no {part} of {name} in the shape {list(values.shape)}")
                    values.copy_(found[part])

    def _moments_of(self, flat: Flat) -> "_SecondMoments":
        if id(flat.tensor) not in self._moments:
            self._moments[id(flat.tensor)] = _SecondMoments(flat, self.config.min_dim_size_to_factor)
        return self._moments[id(flat.tensor)]


class _SecondMoments:
    """Second moments of a flat's parameters, concatenated in one vector: the means of a matrix's rows and columns, or
    all elements of another parameter."""

    def __init__(self, flat: Flat, min_dim_size_to_factor: int):
        self._flat = flat
        self._names: list[list[str]] = []
        sizes: list[int] = []
        counts: list[int] = []  # how many elements each mean is over
        for fragment in flat.fragments:
            if len(fragment.shape) == 2 and min(fragment.shape) >= min_dim_size_to_factor:
                rows, columns = fragment.shape
                self._names.append([ROWS, COLUMNS])
                sizes += [rows, columns]
                counts += [columns, rows]
            else:
                self._names.append([ELEMENTS])
                sizes.append(torch.Size(fragment.shape).numel())
                counts.append(1)
        self._sizes = sizes
        device = flat.tensor.device
        self._counts = torch.tensor(counts, device=device).repeat_interleave(torch.tensor(sizes, device=device))
        self._vector = torch.zeros(sum(sizes), device=device)

    def by_name(self) -> dict[str, dict[str, Tensor]]:
        return {
            fragment.name: parts
            for fragment, parts in zip(self._flat.fragments, self._parts(self._vector), strict=True)
        }

    def sums(self, gradient: Tensor) -> Tensor:
        """This rank's sums of squares, laid out like the vector."""
        squares, sums = gradient.square(), torch.zeros_like(self._vector)
        for fragment, parts in zip(self._flat.fragments, self._parts(sums), strict=True):
            if ROWS in parts:
                for block, rows, columns in fragment.blocks(squares):
                    parts[ROWS][rows] += block.sum(dim=1)
                    parts[COLUMNS][columns] += block.sum(dim=0)
            else:
                parts[ELEMENTS].narrow(0, fragment.start, fragment.size).copy_(fragment.of(squares))
        return sums

    def add(self, sums: Tensor, weight: Tensor, least: float) -> None:
        """Sums `sums` over all ranks and moves the moments towards the result by `weight`."""
        self._vector.lerp_((sums / self._counts).add_(least), weight.to(self._vector.dtype))

    def normalized(self, gradient: Tensor) -> Tensor:
        """g / √V, laid out like the flat."""
        out = gradient.clone()
        for fragment, parts in zip(self._flat.fragments, self._parts(self._vector), strict=True):
            if ROWS in parts and fragment.size:
                of_rows = (parts[ROWS] / parts[ROWS].mean()).rsqrt()
                of_columns = parts[COLUMNS].rsqrt()
                for block, rows, columns in fragment.blocks(out):
                    block.mul_(of_rows[rows, None]).mul_(of_columns[columns])
            elif fragment.size:
                fragment.of(out).mul_(parts[ELEMENTS].narrow(0, fragment.start, fragment.size).rsqrt())
        return out

    def _parts(self, vector: Tensor) -> list[dict[str, Tensor]]:
        """The parts of `vector` that belong to each parameter, by name."""
        pieces = iter(vector.split(self._sizes))
        return [dict(zip(names, itertools.islice(pieces, len(names)), strict=True)) for names in self._names]


ROWS, COLUMNS, ELEMENTS = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"
