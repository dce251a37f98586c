"""Pins repositories of the Hugging Face Hub to commits, since a branch may move before a build is resumed."""

import sys
from typing import Any, TypeVar

from data_pipeline.base import hub, stores
from data_pipeline.base.hub import HubPath
from data_pipeline.base.paths import opening
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.decontamination import Decontamination, DecontaminationConfig

_FILE = ".stages/revisions.json"
_SECONDS = 10.0  # for an answer
Searching = TypeVar("Searching", bound=DecontaminationConfig)


def commit_of(place: HubPath) -> str:
    """The current commit of a revision. Raises UserError if the Hub lacks the revision or doesn't answer."""

    def ask() -> str:
        api, kind = hub.api(), place.kind.removesuffix("s")
        return str(api.repo_info(place.repository, repo_type=kind, revision=place.revision, timeout=_SECONDS).sha)

    with opening(str(place)):
        return stores.with_retries(ask, str(place), stores.LISTING_SECONDS)


def pinned(path: str) -> str:
    """`path` at the current commit of its revision; a path outside the Hub's repositories stays as it is."""
    place = hub.parse(path)
    return path if place is None else str(place.at(commit_of(place)))


def pin(config: CorpusConfig, store: Store) -> tuple[CorpusConfig, dict[str, str]]:
    """`config` with the commits that the build in `store` has begun with, else the current ones; and these commits,
    for `keep`. A line on stderr says which branch has moved since."""
    begun_with, kept = store.read_valid_json(_FILE, dict[str, str]) or {}, dict[str, str]()

    def at_commit(path: str) -> str:
        place = hub.parse(path)
        if place is None or place.is_commit:
            return path
        if (branch := place.root) not in kept:
            now = commit_of(place)
            kept[branch] = begun_with.get(branch, now)
            if kept[branch] != now:
                way_out = f"for the newer one, write {place.at(now).root} in the path"
                print(f"{branch} has moved; continuing with commit {kept[branch]}; {way_out}", file=sys.stderr)
        return str(place.at(kept[branch]))

    def all_of(paths: str | list[str]) -> str | list[str]:
        return at_commit(paths) if isinstance(paths, str) else [*map(at_commit, paths)]

    def with_sets(step: Searching) -> Searching:
        sets = [one.model_copy(update={"path": all_of(one.path)}) for one in step.sets]
        return step.model_copy(update={"sets": sets})

    changed: dict[str, Any] = {"sources": [one.model_copy(update={"path": all_of(one.path)}) for one in config.sources]}
    if config.decontamination.sets:
        changed["decontamination"] = with_sets(config.decontamination)
    if config.steps:
        changed["steps"] = [with_sets(one) if isinstance(one, Decontamination) else one for one in config.steps]
    return config.model_copy(update=changed), kept


def keep(commits: dict[str, str], store: Store) -> None:
    """Records the commits, for builds that continue this one."""
    if commits != (store.read_valid_json(_FILE, dict[str, str]) or {}):
        store.write_json(_FILE, commits)
