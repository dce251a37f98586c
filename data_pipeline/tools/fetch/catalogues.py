"""The files that Common Crawl, the Hugging Face hub and Wikimedia publish, with their published sizes and checksums."""

import gzip
import io
import re
import urllib.parse
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.json_file import parse_json
from data_pipeline.tools.fetch.client import Client, PermanentError
from data_pipeline.tools.fetch.published import C4_CONFIGS, COMMON_CRAWL, HUGGING_FACE, WIKIMEDIA, PublishedFile

_LARGEST_LIST = 1 << 28  # bytes
_NOT_FOUND = {404, 410}


@dataclass(frozen=True)
class _StoredFile:
    """A large file of the Hugging Face hub. `oid`: its sha256."""

    oid: str
    size: int


@dataclass(frozen=True)
class _HubEntry:
    path: str
    size: int | None = None
    lfs: _StoredFile | None = None


@dataclass(frozen=True)
class _DumpFile:
    size: int | None = None
    sha1: str | None = None
    md5: str | None = None

    @property
    def checksum(self) -> str | None:
        return f"sha1:{self.sha1}" if self.sha1 else f"md5:{self.md5}" if self.md5 else None


@dataclass(frozen=True)
class _DumpJob:
    status: str
    files: dict[str, _DumpFile] = field(default_factory=dict)


@dataclass(frozen=True)
class _DumpStatus:
    """dumpstatus.json of a Wikimedia dump."""

    jobs: dict[str, _DumpJob]


def wet_files(client: Client, crawl: str, base_url: str = COMMON_CRAWL) -> list[PublishedFile]:
    """The text files of a crawl ("CC-MAIN-2019-18"), in the order of its wet.paths.gz.

    Common Crawl publishes neither their sizes nor checksums. Raises UserError if the crawl doesn't exist.
    """
    if not re.fullmatch(r"CC-MAIN-\d{4}(-\d{2,4})?", crawl):
        raise UserError(f"{crawl!r}: expected the name of a crawl, such as CC-MAIN-2019-18")
    base_url = _folder(base_url)
    url = f"{base_url}crawl-data/{crawl}/wet.paths.gz"
    missing = f"no crawl {crawl} with text there; crawls are listed at https://index.commoncrawl.org/"
    content, _ = _read(client, url, missing)
    try:
        paths = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_LARGEST_LIST).decode("ascii").split()
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise FailedError(f"{url}: expected a gzip file of paths: {error}") from None
    return [PublishedFile(base_url + path, path) for path in paths]


def c4_files(
    client: Client, config: str = "en", split: str = "train", revision: str = "main", base_url: str = HUGGING_FACE
) -> list[PublishedFile]:
    """The files of a split of C4 in the repository allenai/c4, with sizes and sha256.

    `config`: one of C4_CONFIGS; `split`: "train" or "validation"; `revision`: a branch or commit of the repository.
    Raises UserError if the hub doesn't have them, FailedError if it lists only some of the files.
    """
    if config not in C4_CONFIGS:
        raise UserError(f"--config: {config!r}: expected one of {', '.join(C4_CONFIGS)}")
    if split not in ("train", "validation"):
        raise UserError(f"--split: {split!r}: expected train or validation")
    base_url, revision = _folder(base_url), urllib.parse.quote(revision, safe="")
    listing = f"{base_url}api/datasets/allenai/c4/tree/{revision}/{config}"
    pattern = re.compile(rf"{re.escape(config)}/c4-{split}\.\d{{5}}-of-(\d{{5}})\.json\.gz")
    files, parts = {}, 0
    for entry in _pages(client, listing):
        if match := pattern.fullmatch(entry.path):
            url = f"{base_url}datasets/allenai/c4/resolve/{revision}/{entry.path}"
            size, checksum = (entry.lfs.size, f"sha256:{entry.lfs.oid}") if entry.lfs else (entry.size, None)
            files[entry.path] = PublishedFile(url, entry.path, size, checksum)
            parts = int(match[1])
    if not files or len(files) != parts:
        raise FailedError(f"{listing}: expected {parts or 'some'} files of the split {split}, it lists {len(files)}")
    return [files[path] for path in sorted(files)]


def wikipedia_files(
    client: Client, wiki: str, date: str, job: str = "articlesmultistreamdump", base_url: str = WIKIMEDIA
) -> list[PublishedFile]:
    """The files of one job of a dump ("enwiki", "20240101"), in the order of their pages, with sizes and checksums.

    The checksums are sha1 where published, else md5. The job articlesmultistreamdump has the articles as .xml.bz2
    files, each with an index of its streams. Raises UserError if the dump or job doesn't exist, FailedError if the job
    isn't done.
    """
    if not re.fullmatch(r"[a-z0-9_]+", wiki):
        raise UserError(f"{wiki!r}: expected the name of a wiki, such as enwiki")
    if not re.fullmatch(r"\d{8}", date):
        raise UserError(f"{date!r}: expected the date of a dump, such as 20240101")
    folder = f"{_folder(base_url)}{wiki}/{date}/"
    url = f"{folder}dumpstatus.json"
    content, _ = _read(client, url, f"no dump of {wiki} of {date} there (old ones are deleted)")
    jobs = parse_json(content, _DumpStatus, url).jobs
    if job not in jobs:
        raise UserError(f"{url}: has no job {job!r}, only {', '.join(sorted(jobs))}")
    if (state := jobs[job].status) != "done":
        raise FailedError(f"{url}: the job {job} is {state!r}, expected 'done'; take an earlier dump, or wait")
    return [
        PublishedFile(folder + name, name, file.size, file.checksum)
        for name, file in sorted(jobs[job].files.items(), key=lambda item: _in_order_of_pages(item[0]))
    ]


def _pages(client: Client, url: str) -> Iterator[_HubEntry]:
    """The entries of a paginated list. Each page names the next one in its Link header (RFC 8288)."""
    next_url, seen = url, set()
    while next_url and next_url not in seen:
        seen.add(next_url)
        content, links = _read(client, next_url, "allenai/c4 has no such revision there")
        yield from parse_json(content, list[_HubEntry], next_url)
        # Only the query of the link is used: the pages of a mirror link to the original host.
        query = urllib.parse.urlsplit(links.get("next", {}).get("url", "")).query
        next_url = f"{url}?{query}" if query else ""


def _read(client: Client, url: str, if_not_found: str) -> tuple[bytes, dict[str, dict[str, str]]]:
    try:
        return client.read(url)
    except PermanentError as error:
        raise (
            UserError(f"{url}: {if_not_found}") if error.status in _NOT_FOUND else FailedError(f"{url}: {error}")
        ) from None


def _in_order_of_pages(name: str) -> tuple[list[int], str]:
    """A sort key by part and page numbers: part 10 follows part 9, and an index follows its articles."""
    return [int(number) for number in re.findall(r"\d+", name)], name


def _folder(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) and not parts.query
    except ValueError:  # an invalid port
        valid = False
    if not valid:
        raise UserError(f"--base-url: {url!r}: expected an address such as https://host/folder/")
    return url.rstrip("/") + "/"
