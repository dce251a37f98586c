"""For Python code: builds a corpus, and opens a finished one: its documents, its examples, a loader of its batches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline import corpus as corpora
from data_pipeline.base import arguments, paths
from data_pipeline.base.config_file import Given, load_with
from data_pipeline.base.errors import UserError
from data_pipeline.base.open_store import open_store
from data_pipeline.base.processes import handlers_kept
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.documents import all_documents
from data_pipeline.engine import workers
from data_pipeline.loading.reader import Reader
from data_pipeline.stages import pipeline
from data_pipeline.text.document import Document

if TYPE_CHECKING:
    from data_pipeline.loading.loader import Loader

LANES = 64  # the default of `data.lanes`


@dataclass(frozen=True)
class Example:
    """A row after the objective was applied.

    Attributes:
        row: the number of the row in its split, from 0.
        inputs, targets: token ids.
        inputs_text, targets_text: the same, decoded. Sentinels and special tokens are shown by name; padding and EOS
            are left out.
    """

    row: int
    inputs: list[int]
    targets: list[int]
    inputs_text: str
    targets_text: str


class Corpus(corpora.Corpus):
    """A finished corpus. `rows(split)` is the number of a split's rows.

    Attributes:
        location: the corpus's directory or URL.
        tokenizer: the Tokenizer that made the rows' ids.
        objective: the objective that the corpus was built for, with its settings.
        manifest: the content of manifest.json: splits, counts, checksums and settings.
    """

    def documents(self, split: str | None = None) -> Iterator[Document]:
        """The documents of `split`, or of all splits, in the order of their files.

        A copy of a corpus that was published without documents has none. Raises UserError for a split that the corpus
        doesn't have, and FailedError for a damaged file.
        """
        if split is not None:
            self._check(split)
        found = all_documents(open_store(self.location))
        return (document for document in found if split in (None, document.split))

    def examples(self, split: str = "train", epoch: int = 0) -> Iterator[Example]:
        """Each row of `split` in the order of row numbers, with the noise of `epoch`.

        Noise that was applied at build is the same in all epochs. Raises UserError for a split that the corpus doesn't
        have and for an epoch below 0, and DamagedInput, a FailedError, at a damaged block.
        """
        self._check(split)
        return self._examples(split, arguments.integer("epoch", epoch, 0))

    def _examples(self, split: str, epoch: int) -> Iterator[Example]:
        reader, decode = Reader(self, split), self.tokenizer.decode
        for row in range(self.rows(split)):
            made = reader.examples([row], epoch)
            inputs, targets = (side.values[0, : side.lengths[0]].tolist() for side in (made.inputs, made.targets))
            yield Example(row, inputs, targets, decode(inputs), decode(targets))

    def loader(
        self,
        split: str,
        batch_size: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        seed: int = 0,
        lanes: int = LANES,
        state: Mapping[str, Any] | None = None,
    ) -> "Loader":
        """The batches of one rank; see `Loader`. A run with the same `run.seed` and `data.lanes` has the same rows.

        `split`: a name in `manifest.splits`, such as "train". `batch_size`: rows of this rank in a batch. `rank`, from
        0, and `ranks`: which rank this is, and of how many. `workers`: processes that prepare batches; 0: none, this
        process does. `seed`, `lanes`: the seed of the order and the number of interleaved readers, as in `run.seed` and
        `data.lanes`. `state`: what another loader's `state_dict()` returned, to continue there.

        Raises UserError for a split that the corpus doesn't have, a number out of range, and a state of other rows.
        """
        from data_pipeline.loading.loader import Loader  # PyTorch takes 2 s, and other methods don't need it

        self._check(split)
        made = Loader(self, split, batch_size, rank, ranks, workers, seed, lanes)
        if state is not None:
            made.load_state_dict(state)
        return made

    def _check(self, split: str) -> None:
        if split not in [*self.manifest.splits]:
            raise UserError(f"split: {self.location} has {', '.join(self.manifest.splits)}, got {split!r}")


def open(location: str | Path) -> Corpus:
    """The finished corpus at `location`, a directory or an fsspec URL.

    Blocks of a remote corpus are cached on this machine. Raises UserError if there is no corpus, FailedError if its
    manifest is damaged.
    """
    try:
        found = corpora.open_corpus(paths.location(str(location)))
    except ValueError as error:
        raise UserError(str(error)) from None
    return Corpus(found.directory, found.manifest, found.remote)


def build(config: Given, /, *, strict: bool = False, repair: bool = False, **overrides: Any) -> Corpus:
    """Builds the corpus of a corpus file, or what it lacks, and opens it.

    `config`: a path, `configs:NAME` for a file that ships, or a file's keys and values. `overrides`: keys of the file;
    a section is a mapping, which is merged with the file's: `tokenizer={"vocab_size": 8000}`. `strict` and `repair`
    as in the command. Ray is used if the program has started it; else a large build starts Ray, and ends it again.

    Raises UserError for a wrong config or a missing input, and FailedError if the build fails.
    """
    settings = load_with(config, overrides, CorpusConfig)
    with handlers_kept(), workers.cluster_left():  # Ray sets handlers of its own
        return open(pipeline.build(settings, "shards", strict, repair))
