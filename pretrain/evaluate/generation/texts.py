"""Generates text from text: `Answers`, for `pretrain generate` and samples."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.objectives.randomness import hashed
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.allowed import AllowedOutputs
from pretrain.evaluate.generation.decoding import generate, search
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.models import FAMILIES, Family
from pretrain.models.model import Model

_TOKENS = 16_384  # tokens of a batch, inputs and answers together
_WINDOW = 512  # rows that are sorted by length together, so that their answers come soon
_DIGITS = 16  # of a checksum
_ROWS_ALIKE = 8  # samples: see `row_multiple` of `search`


@dataclass(frozen=True)
class Answer:
    """A generated answer.

    Attributes:
        text: the given text.
        generated: the text that the model generated.
        whole: the continued text, or the text with its masked spans filled in brackets; the answer itself for a text
            without masked spans.
        has_blanks: whether the text has masked spans.
        sample: the number of the sample, from 0; None: not one of several samples.
        score: of several returned beams: the log probability divided by length^length_penalty; None: one answer.
    """

    text: str
    generated: str
    whole: str
    has_blanks: bool
    sample: int | None = None
    score: float | None = None

    def fields(self) -> dict[str, object]:
        """The keys and values of the answer as a JSON line."""
        optional = {"sample": self.sample, "score": self.score}
        present = {name: value for name, value in optional.items() if value is not None}
        return {"text": self.text, **present, "generated": self.generated, "whole": self.whole}


def answer_texts(
    trained: TrainedModel, texts: Sequence[str], settings: GenerationSettings, batch_size: int | None = None
) -> Iterator[Answer]:
    """Generates an answer to each text, in order. See `Answers`."""
    return Answers(trained, texts, settings, batch_size).following(0)


class Answers:
    """The answers to some texts: all answers to the first text, then all answers to the second text, and so on.

    An encoder-decoder reads a text and answers, as does a decoder trained on `in_one_row`; another causal model
    continues the text. The seed, the text and the number of a sample determine the sample, whatever the other texts and
    the batches are. Equal texts have different samples.

    Attributes:
        settings: the settings of generation; with `allowed`, max_new_tokens is at most its longest output.
        per_row: the number of answers that one search gives: the returned beams.
    """

    def __init__(
        self,
        trained: TrainedModel,
        texts: Sequence[str],
        settings: GenerationSettings,
        batch_size: int | None = None,
        samples: int | None = None,
        allowed: AllowedOutputs | None = None,
    ):
        """`batch_size`: texts per batch; None: by length. `samples`: samples of each text; None: one answer. Raises
        UserError if the model doesn't generate, or a text is too long for it."""
        model = trained.model
        family = FAMILIES[model.config.family]
        if family.generates is None:
            raise UserError(f"models of the family {model.config.family} don't generate text")
        self.per_row = settings.num_return_sequences
        if allowed is not None:
            allowed.trie.check(settings)
            settings = settings.model_copy(update={"max_new_tokens": allowed.trie.longest})
            self.per_row = min(self.per_row, allowed.number)
        self.settings = settings
        self._trained, self._texts, self._samples = trained, texts, samples
        self._causal = family.generates == "continuations"
        self._continues = continues(family, trained.objective)
        self._batch_size, self._allowed = batch_size, allowed
        self._inputs = [input_ids(trained, text) for text in texts]
        _check_lengths(self._inputs, self._causal, settings.max_new_tokens, model.config.longest_sequence)
        counts: Counter[str] = Counter()
        self._repeats: list[int] = []  # for each text: how many equal texts precede it
        for text in texts:
            self._repeats.append(counts[text])
            counts[text] += 1

    def __len__(self) -> int:
        return len(self._texts) * (self._samples or 1) * self.per_row

    def identity(self) -> dict[str, object]:
        """What the answers depend on, as JSON: checksums of the model, the texts and the allowed outputs; the settings.

        Computes a checksum of all weights, which takes a second for each 1 to 2 GB.
        """
        allowed = None if self._allowed is None else self._allowed.checksum
        objective = self._trained.objective
        return {
            "model": _checksum(self._trained),
            **({} if objective is None else {"objective": objective}),
            "texts": fingerprint(self._texts)[:_DIGITS],
            "samples": self._samples,
            "allowed": allowed and allowed[:_DIGITS],
            **self.settings.model_dump(),
        }

    def following(self, number: int) -> Iterator[Answer]:
        """The answers from number `number` on."""
        first, passed = divmod(number, self.per_row)
        return itertools.islice(itertools.chain.from_iterable(self._rows(first)), passed, None)

    def has_blanks(self, number: int) -> bool:
        """Whether the text of answer `number` has masked spans to fill."""
        inputs = self._inputs[number // (self.per_row * (self._samples or 1))]
        return not self._continues and any(id_ in self._trained.tokenizer.vocabulary.sentinel_ids for id_ in inputs)

    def _rows(self, first: int) -> Iterator[list[Answer]]:
        """The answers of each row from row `first` on. A row is a text, or a sample of a text."""
        samples, most = self._samples or 1, self._batch_size or _WINDOW
        window, end = max(most, _WINDOW), len(self._texts) * samples
        for start in range(first - first % window, end, window):
            found: dict[int, list[Answer]] = {}
            following = max(start, first)
            for batch in self._batches(range(start, min(start + window, end))):
                if max(batch) < first:
                    continue
                found |= zip(batch, self._answers(batch), strict=True)
                while following in found:
                    yield found.pop(following)
                    following += 1

    def _batches(self, rows: range) -> Iterator[list[int]]:
        """Batches of rows of similar length, short texts first. Samples share a batch only with texts of the same
        length: without padding, they are the same to the bit in any batch."""
        samples, sampled = self._samples or 1, self.settings.temperature > 0.0
        batch: list[int] = []
        for row in sorted(rows, key=lambda row: len(self._inputs[row // samples])):
            length = len(self._inputs[row // samples])
            tokens = (len(batch) + 1) * (length + self.settings.num_beams * self.settings.max_new_tokens)
            full = tokens > _TOKENS if self._batch_size is None else len(batch) == self._batch_size
            if batch and (full or (sampled and length != len(self._inputs[batch[0] // samples]))):
                yield batch
                batch = []
            batch.append(row)
        yield batch

    def _answers(self, rows: Sequence[int]) -> list[list[Answer]]:
        """The answers of some rows."""
        samples = self._samples or 1
        vocabulary = self._trained.tokenizer.vocabulary
        inputs = [self._inputs[row // samples] for row in rows]
        ids, mask = padded(inputs, vocabulary.pad, self._causal, self._trained.device)
        found = search(
            self._trained.model,
            ids,
            mask,
            self.settings,
            numbers=[self._stream(*divmod(row, samples)) for row in rows],
            allowed=None if self._allowed is None else self._allowed.trie,
            row_multiple=_ROWS_ALIKE if self.settings.temperature > 0.0 else 1,
        )
        several = self.settings.num_return_sequences > 1
        return [
            [
                self._answer(row, tokens, score if several else None)
                for tokens, score in zip(texts[: self.per_row], scores, strict=False)
            ]
            for row, texts, scores in zip(rows, found.tokens.tolist(), found.scores.tolist(), strict=True)
        ]

    def _stream(self, text: int, sample: int) -> int:
        """The number of the random stream of a sample, below 2⁶³."""
        sample += self._repeats[text] * (self._samples or 1)
        return hashed(f"{sample}/{self._texts[text]}") >> 1

    def _answer(self, row: int, tokens: list[int], score: float | None) -> Answer:
        number, sample = divmod(row, self._samples or 1)
        tokenizer = self._trained.tokenizer
        one = _answer(tokenizer, self._texts[number], self._inputs[number], tokens, self._continues)
        if self._allowed is not None:
            output = self._allowed.output([*before_eos(tokens, tokenizer.vocabulary), tokenizer.vocabulary.eos])
            assert output is not None  # the search allows no other
            one = replace(one, generated=output, whole=output if one.whole == one.generated else one.whole)
        return replace(one, sample=None if self._samples is None else sample, score=score)


def _answer(tokenizer: Tokenizer, text: str, prompt: list[int], row: list[int], continues: bool) -> Answer:
    vocabulary = tokenizer.vocabulary
    new = without_bos(before_eos(row, vocabulary), vocabulary)
    generated = tokenizer.decode(new)
    if continues:
        return Answer(text, generated, tokenizer.decode([*without_bos(prompt, vocabulary), *new]), has_blanks=False)
    if any(id_ in vocabulary.sentinel_ids for id_ in prompt):
        return Answer(text, generated, _filled(tokenizer, text, new), has_blanks=True)
    return Answer(text, generated, generated, has_blanks=False)


def _checksum(trained: TrainedModel) -> str:
    """A checksum of a model's config, weights and tokenizer."""
    digest = hashlib.sha256(fingerprint([trained.model.config, trained.tokenizer.sha256]).encode())
    for name, tensor in trained.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:_DIGITS]


def written(
    model: Model,
    inputs: Sequence[Sequence[int]],
    vocabulary: Vocabulary,
    settings: GenerationSettings,
    causal: bool,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """The generated ids for each of `inputs`: answers or, if the model is `causal`, continuations. See `generate`."""
    ids, mask = padded(inputs, vocabulary.pad, causal, next(model.parameters()).device)
    return generate(model, ids, mask, settings, numbers=numbers).tolist()


def before_eos(ids: Iterable[int], vocabulary: Vocabulary) -> list[int]:
    """The ids before the first EOS."""
    return list(takewhile(lambda id_: id_ != vocabulary.eos, ids))


def without_bos(ids: list[int], vocabulary: Vocabulary) -> list[int]:
    """The ids without the BOS that prompts and BART's answers may begin with."""
    return ids[1:] if ids[:1] == [vocabulary.bos] else ids


def padded(
    rows: Sequence[Sequence[int]], pad: int, left: bool, device: torch.device | None = None
) -> tuple[Tensor, Tensor | None]:
    """Ids (rows, longest), padded on the right or left, and their attention mask; None: nothing is padded."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    side = "left" if left else "right"
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True, padding_side=side)
    return ids.to(device), None if mask.all() else mask.to(device)


def input_ids(trained: TrainedModel, text: str) -> list[int]:
    """The ids of an input to answer, with BOS and EOS as in training and sentinel k for `<extra_id_k>`; or of a prompt
    to continue, with BOS as published decoders have it. Without any id, EOS.

    A special token that the text begins with, such as UL2's [R], is its id; a space after it belongs to neither.
    """
    tokenizer, family = trained.tokenizer, FAMILIES[trained.model.config.family]
    special = tokenizer.vocabulary.special
    name = max(filter(text.startswith, special), key=len, default="")
    mode, text = ([special[name]], text.removeprefix(name).removeprefix(" ")) if name else ([], text)
    if continues(family, trained.objective):
        begin, ids = first_ids_of_prompts(tokenizer, trained.objective), tokenizer.encode([text])[0]
    else:
        begin = first_ids(tokenizer.vocabulary, family, trained.objective)
        ids = tokenizer.encode_with_sentinels(text)
    return [*begin, *mode, *ids] or [tokenizer.vocabulary.eos]


def continues(family: Family, objective: str | None) -> bool:
    """True if a model of `family` that was trained on `objective` continues a text; False if it answers an input."""
    return family.generates == "continuations" and objective != "in_one_row"


def first_ids(vocabulary: Vocabulary, family: Family, objective: str | None) -> list[int]:
    """The ids that inputs and answers of a model of `family` begin with: BOS, such as BART's, or none.

    Only rows of `denoising` have it. A model of unknown training is taken for one that was published.
    """
    begins = family.inputs_begin_with_bos and objective in (None, "denoising")
    return [vocabulary.bos] if begins and vocabulary.bos is not None else []


def first_ids_of_prompts(tokenizer: Tokenizer, objective: str | None) -> list[int]:
    """The ids that a text to continue begins with: BOS or none.

    A decoder of unknown training is taken for one that was published. It reads BOS where transformers puts BOS before a
    text, as for Llama and Gemma.
    """
    bos = tokenizer.vocabulary.bos
    return [bos] if objective is None and tokenizer.model.begins_with_bos and bos is not None else []


def _check_lengths(inputs: Sequence[list[int]], causal: bool, new: int, longest: int | None) -> None:
    if longest is None:
        return
    problems = []
    if not causal and new > longest:
        problems.append(f"max_new_tokens: {new}, but the model takes sequences of {longest} at most")
    more = new - 1 if causal else 0  # the last token is not read again
    problems += [
        f"text {number}: its {len(ids)} tokens{f' and {more} new ones' if more else ''} exceed the {longest} that the "
        f"model takes"
        for number, ids in enumerate(inputs, 1)
        if len(ids) + more > longest
    ]
    if problems:
        raise UserError("\n".join(problems))


def _filled(tokenizer: Tokenizer, blanks: str, generated: list[int]) -> str:
    spans = split_spans(generated, tokenizer.vocabulary)
    words = {tokenizer.decode([id_]): tokenizer.decode(span).strip() for id_, span in spans.items()}
    return re.sub(r"<extra_id_\d+>", lambda mark: f"[{words.get(mark[0], '')}]", blanks)


def split_spans(target_ids: Iterable[int], vocabulary: Vocabulary) -> dict[int, list[int]]:
    """The span after each sentinel of a target sequence, up to eos.

        targets:  <x> for inviting <y> last </s>    →    {<x>: for inviting, <y>: last}

    Tokens before the first sentinel are dropped, and of a repeated sentinel all spans but the first.
    """
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in before_eos(target_ids, vocabulary):
        if token in vocabulary.sentinel_ids:
            span = []
            spans.setdefault(token, span)
        elif token != vocabulary.pad:
            span.append(token)
    return spans
