"""The files that Common Crawl, the Hugging Face hub and Wikimedia publish, with their published sizes and checksums."""

import gzip
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from data_pipeline.foundation.errors import FailedError, UserError, one_line

COMMON_CRAWL = "https://data.commoncrawl.org"
HUGGING_FACE = "https://huggingface.co"
WIKIMEDIA = "https://dumps.wikimedia.org"

Read = Callable[[str, str], bytes]
"""(address, what to say if nothing is there) -> content"""


@dataclass(frozen=True)
class PublishedFile:
    """A file in a publisher's list: its address, its place below the output directory, its bytes, and its checksum as
    "sha256:…", "sha1:…" or "md5:…". The last two are None if the publisher gives none.

    Lists come from the network. FailedError refuses a path that could leave the output directory, and names that start
    with a dot, as the folder for partial files does.
    """

    url: str
    path: str
    size: int | None = None
    checksum: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\w[\w.+=-]*/)*\w[\w.+=-]*", self.path, re.ASCII):
            raise FailedError(f"{self.url}: refused: the list has the path {self.path!r}")


@dataclass(frozen=True)
class _DumpFile:
    size: int | None = None
    sha1: str | None = None
    md5: str | None = None


@dataclass(frozen=True)
class _DumpJob:
    status: str
    files: dict[str, _DumpFile] = field(default_factory=dict)


@dataclass(frozen=True)
class _DumpStatus:
    """dumpstatus.json of a Wikimedia dump."""

    jobs: dict[str, _DumpJob]


def wet_files(read: Read, crawl: str, base_url: str = COMMON_CRAWL) -> list[PublishedFile]:
    """The text files of a crawl ("CC-MAIN-2019-18"), in the order of its wet.paths.gz.

    Common Crawl publishes neither their sizes nor checksums. Raises UserError if the crawl doesn't exist.
    """
    url = f"{base_url}/crawl-data/{crawl}/wet.paths.gz"
    content = read(url, f"no crawl {crawl} with text there; crawls are listed at https://index.commoncrawl.org/")
    try:
        paths = gzip.decompress(content).decode("ascii").split()
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise FailedError(f"{url}: expected a gzip file of paths: {error}") from None
    return [PublishedFile(f"{base_url}/{path}", path) for path in paths]


def c4_files(config: str, split: str, revision: str, base_url: str = HUGGING_FACE) -> list[PublishedFile]:
    """The files of a split of C4 in the repository allenai/c4, with sizes and sha256.

    `config`: a folder there ("en"); `split`: "train" or "validation"; `revision`: a branch or commit.
    Raises UserError if the hub doesn't have them, FailedError if it doesn't answer.
    """
    import huggingface_hub  # slow to import

    where = {"repo_id": "allenai/c4", "repo_type": "dataset", "revision": revision}
    prefix = f"{config}/c4-{split}."
    try:
        entries = list(huggingface_hub.HfApi(base_url).list_repo_tree(**where, path_in_repo=config))
    except Exception as error:  # the hub's own, and those of the HTTP library below it, which changes
        missing = getattr(getattr(error, "response", None), "status_code", None) == 404
        raise (UserError if missing else FailedError)(f"{base_url}: {one_line(error)}") from None
    files = []
    for entry in sorted(entries, key=lambda entry: entry.path):
        if entry.path.startswith(prefix):
            url = huggingface_hub.hf_hub_url(**where, filename=entry.path, endpoint=base_url)
            checksum = f"sha256:{entry.lfs.sha256}" if entry.lfs else None
            files.append(PublishedFile(url, entry.path, entry.size, checksum))
    if not files:
        raise UserError(f"{base_url}: allenai/c4 has no files {prefix}*")
    return files


def wikipedia_files(
    read: Read, wiki: str, date: str, job: str = "articlesmultistreamdump", base_url: str = WIKIMEDIA
) -> list[PublishedFile]:
    """The files of one job of a dump ("enwiki", "20240101"), in the order of their pages, with sizes and checksums.

    The checksums are sha1 where published, else md5. The job articlesmultistreamdump has the articles as .xml.bz2
    files, each with an index of its streams. Raises UserError if the dump or job doesn't exist, FailedError if the job
    isn't done.
    """
    folder = f"{base_url}/{wiki}/{date}"
    url = f"{folder}/dumpstatus.json"
    from data_pipeline.foundation.json_file import parse_json  # loads pydantic, which --help does without

    jobs = parse_json(
        read(url, f"no dump of {wiki} of {date} there; dates are like 20240101, and old dumps are deleted"),
        _DumpStatus,
        url,
    ).jobs
    if job not in jobs:
        raise UserError(f"{url}: has no job {job!r}, only {', '.join(sorted(jobs))}")
    if (state := jobs[job].status) != "done":
        raise FailedError(f"{url}: the job {job} is {state!r}, expected 'done'; take an earlier dump, or wait")
    published = []
    for name in sorted(jobs[job].files, key=_in_order_of_pages):
        file = jobs[job].files[name]
        checksum = f"sha1:{file.sha1}" if file.sha1 else f"md5:{file.md5}" if file.md5 else None
        published.append(PublishedFile(f"{folder}/{name}", name, file.size, checksum))
    return published


def _in_order_of_pages(name: str) -> tuple[list[int], str]:
    """A sort key by part and page numbers: part 10 follows part 9, and an index follows its articles."""
    return [int(number) for number in re.findall(r"\d+", name)], name
