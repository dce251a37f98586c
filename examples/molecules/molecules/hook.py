"""The hook `moses`: molecules that a model writes, judged by MOSES' metrics."""

from collections.abc import Sequence
from itertools import islice

from molecules.metrics import measured
from molecules.settings import MosesSettings
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import Answers
from pretrain.evaluate.hook import EvalResult, Evaluation
from pretrain.run import watchdog

BLANK = "<extra_id_0>"
_AT_ONCE = 512  # samples that a rank writes between two looks at the budget
_SHOWN = 10


class Moses:
    """Metrics `moses/valid`, `moses/unique_at_10000`, `moses/fcd_test` and so on, and a table of molecules.

    The ranks divide the samples, which end early once the budget is spent. Rank 0 has the metrics computed in a process
    of their own.
    """

    def __init__(self, settings: MosesSettings):
        self._settings = settings

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        settings = self._settings
        with evaluation.whole_model() as model:
            trained = TrainedModel(model, evaluation.held_out.tokenizer)
            options = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
            generation = GenerationSettings(seed=settings.seed, **options)
            answers = Answers(trained, [settings.prompt], generation, samples=settings.samples)

            def written(starts: Sequence[int]) -> list[list[str]]:
                return [self._written(answers, start) for start in starts]

            smiles = list[str]()
            step = _AT_ONCE * evaluation.held_out.layout.ranks
            for first in range(0, settings.samples, step):
                starts = range(first, min(first + step, settings.samples), _AT_ONCE)
                smiles += [one for some in evaluation.shared(starts, written, list[str]) for one in some]
                if evaluation.collectives.late:
                    break
        if evaluation.held_out.layout.rank > 0:
            return EvalResult()
        found = {metric_name(name): value for name, value in measured(smiles, settings.all_metrics).items()}
        line = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        rows = [{"sample": number, "molecule": one} for number, one in enumerate(smiles[:_SHOWN])]
        return EvalResult(
            {f"moses/{name}": value for name, value in found.items()},
            {"moses": rows},
            lines=[f"{len(smiles):,} molecules: {line}"],
        )

    def _written(self, answers: Answers, start: int) -> list[str]:
        """The molecules of one share of the samples."""
        watchdog.alive()
        some = islice(answers.following(start), min(_AT_ONCE, self._settings.samples - start))
        return [filled(self._settings.prompt, one.generated) for one in some]


def filled(prompt: str, generated: str) -> str:
    """The molecule of an answer: the prompt with its blank filled; the answer itself if the prompt has no blank."""
    span = generated.removeprefix(BLANK)
    return prompt.replace(BLANK, span) if BLANK in prompt else span


def metric_name(column: str) -> str:
    """The metric's name of a column of MOSES' table.

    >>> metric_name("unique@10000"), metric_name("FCD/TestSF")
    ('unique_at_10000', 'fcd_testsf')
    """
    return column.replace("@", "_at_").replace("/", "_").lower()
