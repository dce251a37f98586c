"""What `launch doctor` runs on each machine: answers one line of stdin with lines of JSON."""

import dataclasses
import json
import os
import socket
import sys
import time
from typing import Any

from launch.tools.doctor import ranks, versions
from launch.tools.doctor.checks import OF_A_NODE, Settings, checked
from pretrain.run.hardware import count_gpus, free_port


def node() -> int:
    given = json.loads(sys.stdin.readline())
    os.environ |= given["environment"]
    os.chdir(given["directory"])
    index = given["index"] if isinstance(given["index"], int) else int(os.environ[given["index"]])
    if group := given.get("group"):
        answers = ranks.run(ranks.Group(**group), index)
        _say(index, answers=answers.as_json())
        return 0
    settings = Settings(**given["settings"][index])
    reached = os.environ.get("SSH_CONNECTION", "").split()
    _say(
        index,
        host=socket.gethostname(),
        ranks=settings.ranks or count_gpus() or 1,
        port=free_port(),
        address=reached[2] if len(reached) == 4 else None,
        versions=versions.shown(),
    )
    for finding in checked(OF_A_NODE, settings):
        _say(index, finding=dataclasses.asdict(finding))
    return 0


def _say(index: int, **what: Any) -> None:
    print(json.dumps({"index": index, "clock": time.time(), **what}), flush=True)
