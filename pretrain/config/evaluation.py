"""The settings of evaluation hooks: the items of `evaluation` in a run file. This module doesn't import torch."""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import combinations
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_pipeline.base.config_file import LocalPath, Section
from data_pipeline.base.packages import offered

AnswerMetric = Literal[
    "exact_match",
    "squad_exact_match",
    "squad_f1",
    "bleu",
    "chrf",
    "rouge1",
    "rouge2",
    "rougeL",
    "rougeLsum",
    "rank_accuracy",
]
_INPUTS_ARE_TARGETS = ("causal_lm", "causal_infilling", "in_one_row", "masked_lm")


class HookSettings(Section):
    """The settings that all hooks have. A subclass sets `implementation` and `hook`, a Literal with the hook's name."""

    implementation: ClassVar[str]
    """The hook's class, as "package.module.Class". See `pretrain.evaluate.hook`."""
    needs_corpus: ClassVar[bool] = True
    """True if the hook reads the held-out rows of `data.validation`."""
    in_training: ClassVar[bool] = False
    """True if the hook measures training steps; `pretrain evaluate` can't run such a hook on a checkpoint."""

    hook: str
    """The hook's name."""
    every_steps: PositiveInt = 500
    """Steps between evaluations."""
    budget_seconds: PositiveFloat | None = 60.0
    """Maximum duration of an evaluation, in seconds. A longer evaluation is cut, and the run prints a line. null: no
    limit."""

    def problems(self, held_out: Mapping[str, str]) -> list[str]:
        """The reasons why the hook can't evaluate the corpora `held_out`, one line each. `held_out` maps a corpus's
        name to the full name of its objective."""
        return []


class ValidationLossSettings(HookSettings):
    """Loss, perplexity and accuracy on the held-out rows, the loss on text tokens only, and the unigram entropy of the
    text."""

    implementation: ClassVar[str] = "pretrain.evaluate.validation_loss.ValidationLoss"

    hook: Literal["validation_loss"] = "validation_loss"
    every_steps: PositiveInt = 1000
    budget_seconds: PositiveFloat | None = None
    """Maximum duration of an evaluation, in seconds. A longer evaluation is cut: the loss is then that of the rows so
    far. null: no limit."""
    rows: PositiveInt | None = None
    """Number of held-out rows of each corpus to evaluate, rounded up to whole batches. null: all rows."""


class InputUseSettings(HookSettings):
    """How much the model uses its input: the held-out loss with the right input, with another row's input, and without
    input."""

    implementation: ClassVar[str] = "pretrain.evaluate.input_use.InputUse"

    hook: Literal["input_use"] = "input_use"
    every_steps: PositiveInt = 1000
    rows: PositiveInt = 1024
    """Maximum number of held-out rows of each corpus to evaluate."""

    def problems(self, held_out: Mapping[str, str]) -> list[str]:
        problems = []
        for name, objective in held_out.items():
            if objective == "full_lm":
                problems.append(f"hook: {name} has no input (full_lm), so none can be exchanged")
            elif objective.split()[0] in _INPUTS_ARE_TARGETS:
                problems.append(f"hook: inputs of {name} are its targets ({objective}), so none can be exchanged")
        return problems


class SamplesSettings(HookSettings):
    """Texts that the model writes: it fills masked words in held-out sentences, or continues their beginnings."""

    implementation: ClassVar[str] = "pretrain.evaluate.samples.Samples"

    hook: Literal["samples"] = "samples"
    number: PositiveInt = 4
    """Number of sentences from each corpus."""
    max_new_tokens: PositiveInt = 40
    """Maximum length of an answer, in tokens."""
    seed: int = 0
    """Seed of the masks."""


class PairsSettings(HookSettings):
    """The settings of hooks that answer held-out inputs of text-to-text pairs."""

    corpus: str | None = None
    """Name (in metrics) of the held-out corpus whose pairs are answered. null: every corpus that has pairs."""
    file: LocalPath | None = None
    """A file of pairs to answer instead. `targets` may list several right answers, and `choices` the labels to rank.
    null: the held-out rows."""
    prefix: str = ""
    """Text to put before every input of `file`."""
    rows: PositiveInt = 500
    """Maximum number of held-out rows of each corpus to answer."""
    shown: PositiveInt = 20
    """Number of answers that the table shows."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.file is None and self.prefix:
            raise ValueError("prefix: is for `file`; for a corpus, set options.prefix of its source")
        if self.file is not None and self.corpus is not None:
            raise ValueError("corpus: the pairs come from a corpus or from a file, not from both")
        return self

    @property
    def needs_corpus(self) -> bool:  # type: ignore[override]
        return self.file is None

    @property
    def name(self) -> str:
        """The name in metrics of the pairs of `file`."""
        return Path(self.file or "").name.partition(".")[0]

    def names(self, held_out: Mapping[str, str]) -> list[str]:
        """The names in metrics of what the hook answers. `held_out`: see `problems`."""
        if self.file is not None:
            return [self.name]
        pairs = [name for name, objective in held_out.items() if objective.endswith("text_to_text")]
        return [name for name in pairs if self.corpus in (None, name)]

    def problems(self, held_out: Mapping[str, str]) -> list[str]:
        if self.file is not None:
            return _missing("file", self.file)
        there = ", ".join(held_out) or "none"
        if self.corpus is not None and self.corpus not in held_out:
            return [f"corpus: no held-out corpus is named {self.corpus!r}; there is {there}"]
        if not self.names(held_out):
            return [f"corpus: {self.corpus or there} has no text-to-text pairs"]
        return []


def _missing(key: str, path: str) -> list[str]:
    return [] if Path(path).is_file() else [f"{key}: {path}: no such file"]


class TextToTextSettings(PairsSettings):
    """The model answers held-out inputs of text-to-text pairs, and metrics compare its answers with the targets."""

    implementation: ClassVar[str] = "pretrain.evaluate.text_to_text.TextToTextAnswers"

    hook: Literal["text_to_text"] = "text_to_text"
    metrics: Annotated[list[AnswerMetric], Field(min_length=1)] = ["exact_match"]
    """The metrics. They range from 0 to 1, except `bleu` and `chrf`, which range from 0 to 100."""
    choices: list[str] = []
    """The labels that `rank_accuracy` ranks, for rows without choices of their own. Empty: the distinct targets of the
    held-out rows."""
    max_new_tokens: PositiveInt | None = None
    """Maximum length of an answer, in tokens. null: the maximum target length of the corpus's objective."""
    num_beams: PositiveInt = 1
    """Number of beams in beam search. 1: greedy decoding."""

    @property
    def ranks(self) -> bool:
        """True if a metric ranks choices."""
        return "rank_accuracy" in self.metrics

    @property
    def writes(self) -> bool:
        """True if a metric needs generated answers."""
        return {*self.metrics} != {"rank_accuracy"}


class RetrievalSettings(PairsSettings):
    """The model retrieves: beam search over the allowed outputs for each held-out input of text-to-text pairs. Recall
    and NDCG compare the outputs found with the targets."""

    implementation: ClassVar[str] = "pretrain.evaluate.retrieval.Retrieval"

    hook: Literal["retrieval"] = "retrieval"
    at: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 10]
    """The cutoffs k: the metrics count the first k outputs found."""
    allowed: LocalPath | None = None
    """A file of the allowed outputs, one text a line; in a .jsonl file, a string or a list of ids. null: the distinct
    targets of the whole corpus, or of `file`."""
    num_beams: Annotated[int, Field(ge=2)] = 10
    """Number of beams in beam search, at least the largest cutoff."""
    length_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Outputs are ordered by log probability divided by length^penalty. 0: by probability."""

    @model_validator(mode="after")
    def _enough_beams(self) -> Self:
        if max(self.at) > self.num_beams:
            raise ValueError(f"at: {max(self.at)} exceeds num_beams, {self.num_beams}")
        return self

    def problems(self, held_out: Mapping[str, str]) -> list[str]:
        return super().problems(held_out) + (_missing("allowed", self.allowed) if self.allowed else [])


_SHIPPED: tuple[type[HookSettings], ...] = (
    ValidationLossSettings,
    InputUseSettings,
    SamplesSettings,
    TextToTextSettings,
    RetrievalSettings,
)


def clashes(hooks: Sequence[HookSettings], held_out: Mapping[str, str]) -> list[tuple[int, str]]:
    """For each hook whose table and metrics an earlier hook has too: its number, and a line that says so.

    `held_out`: see `HookSettings.problems`. Hooks that differ in `every_steps` alone find the same.
    """
    lines = []
    numbered = [(number, hook) for number, hook in enumerate(hooks) if isinstance(hook, PairsSettings)]
    for (first, one), (second, other) in combinations(numbered, 2):
        both = [name for name in one.names(held_out) if name in other.names(held_out)]
        if one.hook == other.hook and both and one.model_copy(update={"every_steps": other.every_steps}) != other:
            key, way_out = "corpus", "name another corpus, or make one hook of the two"
            if other.file is not None:
                key, way_out = "file", "give the file another name"
            lines.append((second, f"{key}: hook {first} records {other.hook}/{both[0]} already; {way_out}"))
    return lines


HOOKS = {str(settings.model_fields["hook"].default): settings for settings in _SHIPPED}
HOOKS |= offered("hooks", HookSettings, HOOKS, "hook")
"""The settings of shipped hooks and of hooks that installed packages offer, by name."""
SUITES = {
    "fast": [ValidationLossSettings.model_fields["hook"].default],
    "full": [settings.model_fields["hook"].default for settings in _SHIPPED if settings is not RetrievalSettings],
}
"""The hooks that `pretrain evaluate --suite` runs. Retrieval is for tasks whose targets are a catalogue."""

if TYPE_CHECKING:
    AnyHookSettings = HookSettings
else:
    AnyHookSettings = Annotated[reduce(or_, HOOKS.values()), Field(discriminator="hook")]
    """An item of `evaluation` in a run file; `hook` selects the class."""
