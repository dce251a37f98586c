"""Pure functions from (tokens, row keys) to inputs and targets."""

from typing import Annotated

from pydantic import Field

from data_pipeline.objectives.objective import Examples, Objective, Padded, placed, together
from data_pipeline.objectives.span_corruption import SpanCorruption

AnyObjective = Annotated[SpanCorruption, Field()]

__all__ = ["AnyObjective", "Examples", "Objective", "Padded", "SpanCorruption", "placed", "together"]
