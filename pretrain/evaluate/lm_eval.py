"""Runs tasks of EleutherAI's lm-evaluation-harness on a model: `pretrain evaluate --lm-eval TASKS`.

The encoder reads the context and the decoder the continuation, in the format of the model's training, and EOS is
scored. The harness's own class for encoder-decoders isn't used: it never scores EOS, which favours an answer that
another answer begins with; it pads on the left, which shifts learned positions; and without a context its encoder reads
no token.
"""

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.base.config_file import check
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import before_eos, split_spans, without_bos, written
from pretrain.evaluate.hook import EvalResult, Evaluation
from pretrain.evaluate.prompt_format import Prompt, PromptFormat, PromptScores
from pretrain.models.model import Model

_NEW_TOKENS = 256  # maximum length of an answer, unless the task sets another or the model has too few positions
_OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class LmEvalSettings:
    """The settings of a run of the harness.

    Attributes:
        tasks: names of tasks.
        include_path: a folder that may define tasks.
        few_shot: number of examples before each question.
        limit: maximum number of rows of each task.
    """

    tasks: Sequence[str]
    include_path: Path | None = None
    few_shot: int | None = None
    limit: int | None = None


class LmEvalRequests:
    """Answers the harness's requests, divided among the ranks. All ranks get all requests and all answers."""

    def __init__(self, model: Model, prompt_format: PromptFormat, evaluation: Evaluation, batch_size: int):
        self._model = model
        self._format = prompt_format
        self._evaluation = evaluation
        self._scores = PromptScores(prompt_format, evaluation, batch_size)
        self._tokenizer: Tokenizer = evaluation.held_out.tokenizer

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation), log p of the continuation, and whether all its tokens are the likeliest.

        An encoder-decoder's EOS counts too.
        """
        return self._scores([self._prompt(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """log p of each text, without an EOS token; see `PromptFormat.windows`."""
        windows = [self._format.windows(ids) for ids in self._tokenizer.encode(list(texts))]
        found = iter(self._scores([prompt for prompts in windows for prompt in prompts]))
        return [sum(next(found)[0] for _ in prompts) for prompts in windows]

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """An answer to each (context, settings), cut before the first of the strings `until`. Equal requests have
        different samples."""
        numbered = [(number, *one) for number, one in enumerate(requests)]
        return self._evaluation.shared(numbered, lambda mine: [self._answer(*one) for one in mine], str)

    def _prompt(self, context: str, continuation: str) -> Prompt:
        encode = self._tokenizer.encode
        if self._format.form != "continuation" or self._format.separated:  # two texts without a space between them
            before, after = encode([context.rstrip(), continuation.lstrip()])
            return self._format.prompt(before, after)
        bare = context.rstrip()  # a space belongs to the next word's token
        whole, before = encode([context + continuation, bare])
        return self._format.prompt(before, whole[len(before) :])

    def _answer(self, number: int, context: str, options: Mapping[str, Any]) -> str:
        causal, copies = self._format.form == "continuation", self._format.form == "copy"
        longest = self._format.config.longest_sequence
        # a decoder that reads the context too has half of its positions for the answer, unless the task says otherwise
        default = _NEW_TOKENS if longest is None else min(_NEW_TOKENS, longest // 2 if causal or copies else longest)
        settings, until = _decoding(options, default)
        begins = 1 if copies else 0 if self._format.form == "blank" else len(self._format.begin)  # with <s>
        most = settings.max_new_tokens if longest is None else min(settings.max_new_tokens, longest - begins)
        ids = self._tokenizer.encode([context.rstrip()])[0]
        if copies and longest is not None:  # the end of the context, with room for <s> and the answer
            ids = ids[max(len(ids) - (longest - 1 - most), 0) :]
        prompt = self._format.prompt(ids, [])
        inputs = prompt.prefix if causal else prompt.encoder
        if causal and longest is not None:  # the end of the prompt, with room for the answer
            inputs = [*inputs[:begins], *inputs[begins:][-max(longest - most + 1 - begins, 1) :]]
        first = 0 if causal else len(prompt.prefix) if copies else begins  # ids that the model writes before the answer
        settings = settings.model_copy(update={"max_new_tokens": first + most})
        vocabulary = self._tokenizer.vocabulary
        (row,) = written(self._model, [inputs], vocabulary, settings, causal, numbers=[number])
        new = before_eos(row, vocabulary)
        new = new[first:] if copies else without_bos(new, vocabulary)
        if self._format.form == "blank":
            new = split_spans(new, vocabulary).get(vocabulary.first_sentinel, [])
        text = self._tokenizer.decode(new)
        for stop in until:
            text = text.partition(stop)[0] if stop else text
        return text


def _decoding(options: Mapping[str, Any], default: int) -> tuple[GenerationSettings, list[str]]:
    """A task's settings of generation, from lm_eval's names, and the strings that end an answer. `default`: its maximum
    length."""
    until = options.get("until") or []
    sampled = bool(options.get("do_sample")) and float(options.get("temperature") or 0) > 0
    values: dict[str, Any] = {"max_new_tokens": options.get("max_gen_toks", options.get("max_new_tokens", default))}
    if sampled:
        values |= {name: options[name] for name in ("temperature", "top_k", "top_p") if name in options}
    elif "num_beams" in options:
        values["num_beams"] = options["num_beams"]
    settings = check(values, GenerationSettings, "generation_kwargs")
    return settings, [until] if isinstance(until, str) else list(until)


def run_tasks(requests: LmEvalRequests, settings: LmEvalSettings) -> tuple[EvalResult, dict[str, Any]]:
    """Runs the tasks; returns the metrics `lm_eval/TASK/METRIC`, with lm_eval's table as lines, and lm_eval's results.

    Raises UserError if lm_eval isn't installed, or doesn't have or can't load a task, or if a task names a column that
    its rows lack.
    """
    for name, value in _OFFLINE.items():
        os.environ.setdefault(name, value)
    try:
        with _quiet():
            from datasets.exceptions import DatasetGenerationError  # lm_eval's, an extra, which takes 2 s
            from jinja2 import TemplateError
            from lm_eval.api.model import LM
            from lm_eval.evaluator import simple_evaluate
            from lm_eval.tasks import TaskManager
            from lm_eval.utils import make_table
    except ImportError as error:
        raise UserError(f"--lm-eval: {error}; to install it: pip install encdec-pretrain[lm-eval]") from None

    class Adapter(LM):
        def loglikelihood(self, instances: list[Any]) -> list[tuple[float, bool]]:
            return requests.loglikelihood([one.args for one in instances])

        def loglikelihood_rolling(self, instances: list[Any]) -> list[float]:
            return requests.rolling([one.args[0] for one in instances])

        def generate_until(self, instances: list[Any]) -> list[str]:
            return requests.generate([one.args for one in instances])

    with _quiet():
        tasks = _tasks(settings, TaskManager)
        try:
            results = simple_evaluate(
                Adapter(),
                tasks=list(settings.tasks),
                num_fewshot=settings.few_shot,
                limit=settings.limit,
                task_manager=tasks,
                bootstrap_iters=1000,
                log_samples=False,
            )
        except (OSError, ValueError, KeyError, TemplateError, DatasetGenerationError) as error:
            cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
            first = (str(cause).strip().splitlines() or [""])[0]
            raise UserError(f"--lm-eval: {','.join(settings.tasks)}: {type(cause).__name__}: {first}") from error
    if results is None:  # on other ranks than 0
        return EvalResult(), {}
    metrics = {
        f"lm_eval/{task}/{name.removesuffix(',none').replace(',', '/')}": float(value)
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("sample_len",)
    }
    return EvalResult(metrics, lines=make_table(results).rstrip().splitlines()), results


def _tasks(settings: LmEvalSettings, manager: Any) -> Any:
    """The index of tasks. lm_eval's own thousands are indexed only if `include_path` lacks a task."""
    include = str(settings.include_path) if settings.include_path else None
    for defaults in (False, True) if include else (True,):
        tasks = manager(include_path=include, include_defaults=defaults)
        unknown = [name for name in settings.tasks if not tasks.match_tasks([name])]
        if not unknown:
            return tasks
    where = f"{include} or " if include else ""
    raise UserError(f"--lm-eval: no task {unknown[0]!r} in {where}lm_eval; --include-path names a folder of tasks")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the block, lm_eval and its libraries log errors only and draw no progress bars."""
    names = ("lm_eval", "datasets", "evaluate", "huggingface_hub")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    for logger, _ in before:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
