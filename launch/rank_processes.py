"""Each rank runs below a shell, which keeps what it writes and how it ends: DeepSpeed's launcher tells neither."""

from pathlib import Path

from pretrain.rank_logs import SUPERVISED

_SIGNAL = 128  # a shell adds it to the number of the signal that ended a process
_KEEP = f"""
log="${SUPERVISED}/rank-$(printf %05d "$RANK")"
exec >> "$log.log" 2>&1
"$@"
code=$?
echo $code > "$log.exit"
exit $code
"""


def kept(command: list[str]) -> list[str]:
    """`command` with its output in RANK's log, and its exit code beside that once it has ended."""
    return ["sh", "-c", _KEEP, "sh", *command]


def ended(logs: Path) -> dict[int, int]:
    """Exit codes by rank, negative for a signal; who ended first stands in front."""
    codes: dict[int, int] = {}
    for file in sorted(logs.glob("rank-*.exit"), key=lambda file: file.stat().st_mtime_ns):
        if told := file.read_text().strip():  # empty while it is written
            code = int(told)
            codes[int(file.stem.removeprefix("rank-"))] = _SIGNAL - code if code > _SIGNAL else code
    return codes
