"""Parent runs: the runs of an experiment's folder stand below one run in MLflow."""

from typing import Any

_TAG = "parent_of_runs"  # the tag that tells a parent from a training run of the same name


def parent_run(client: Any, experiment_id: str, name: str) -> str:
    """The id of the parent run `name`, which is created if it doesn't exist.

    Runs that start together may each create one. All of them then take the oldest, and the others are deleted.
    """
    found = _search(client, experiment_id, name)
    if not found:
        created = client.create_run(experiment_id, tags={_TAG: _value(name)}, run_name=name).info.run_id
        found = _search(client, experiment_id, name)
        if found[0].info.run_id != created:
            client.delete_run(created)
    return found[0].info.run_id


def settle_parent(client: Any, experiment_id: str, parent_id: str) -> None:
    """Ends the parent run once none of its runs is running; it has failed if one of them has."""
    runs = client.search_runs([experiment_id], f"tags.`mlflow.parentRunId` = '{parent_id}'")
    statuses = {run.info.status for run in runs}
    if "RUNNING" not in statuses:
        status = next((one for one in ("FAILED", "KILLED") if one in statuses), "FINISHED")
        client.set_terminated(parent_id, status)


def _search(client: Any, experiment_id: str, name: str) -> list[Any]:
    """The parent runs `name`, the oldest first."""
    runs = client.search_runs([experiment_id], f"tags.{_TAG} = '{_value(name)}'")
    return sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))


def _value(name: str) -> str:
    """`name` as the value of a tag that a filter can hold."""
    return name.replace("'", "_")
