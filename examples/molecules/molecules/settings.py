"""The settings of the hook `moses`. This module doesn't import torch."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from pretrain.config.evaluation import HookSettings


class MosesSettings(HookSettings):
    """Molecules that the model writes, judged by MOSES' metrics: valid, unique, new, and FCD."""

    implementation: ClassVar[str] = "molecules.hook.Moses"
    needs_corpus: ClassVar[bool] = False

    hook: Literal["moses"] = "moses"
    every_steps: PositiveInt = 1000
    budget_seconds: float | None = Field(None, gt=0)
    samples: int = Field(2000, ge=2)
    """Number of molecules. FCD falls with their number: only 30,000 may be compared with MOSES' table."""
    prompt: str = "<extra_id_0>"
    """The input of every sample. For a decoder and for `full_lm`, the empty text."""
    max_new_tokens: PositiveInt = 80
    """Maximum length of a molecule, in tokens."""
    temperature: float = Field(1.0, gt=0)
    """The temperature of sampling."""
    seed: int = 0
    """Seed of sampling."""
    all_metrics: bool = False
    """Also compute the other columns of MOSES' table, which takes 9 minutes of a core for 30,000 molecules."""
