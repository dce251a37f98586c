"""What makes a GPU fail or slow: errors of its memory, messages of its driver, MIG, throttling, other users.

The elements are those of `nvidia-smi -q -x`, in the form of the drivers since 535 (nvsmi_device_v12.dtd and later).
"""

import re
from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from launch.tools.doctor.findings import Finding, Level

_BUSY = 1024  # MiB
_SLOW = {  # elements of clocks_event_reasons; that power is capped is normal under load
    "hw_thermal_slowdown": "too hot",
    "sw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "the machine lacks power",
    "hw_slowdown": "slowed down by the hardware",
}
# NVIDIA's document "Xid Errors": those of the hardware. Others, such as 13, 31 and 43, come from programs.
_XIDS = {
    48: "an uncorrectable error of the memory",
    63: "a row of the memory was remapped",
    64: "a row of the memory could not be remapped",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "many corrected errors of the memory",
    94: "a contained error of the memory",
    95: "an uncontained error of the memory",
    119: "the GPU's firmware doesn't answer",
    120: "an error of the GPU's firmware",
}
_XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+)")


def of_gpus(gpus: Sequence[Element]) -> list[Finding]:
    """The faults and warnings, each with the numbers of the GPUs that it concerns."""
    found = []
    for title, level, words, remedy, of_gpu in _CHECKS:
        reasons = {number: reason for number, gpu in enumerate(gpus) if (reason := of_gpu(gpu))}
        if reasons:
            named = ", ".join(map(str, reasons))
            said = "; ".join(dict.fromkeys(reasons.values()))
            found.append(Finding(title, level, f"GPUs {named}: {said}", words, remedy))
    return found


def of_kernel_log(log: str) -> list[Finding]:
    """Messages of the driver about broken hardware since the machine has started (Xid)."""
    seen = {(bus, int(number)) for bus, number in _XID.findall(log) if int(number) in _XIDS}
    if not seen:
        return []
    said = "; ".join(f"{bus}: Xid {number}, {_XIDS[number]}" for bus, number in sorted(seen))
    return [Finding("GPU errors", "warning", said, "none since the start", "drain the node, reset the GPU, test it")]


def _errors(gpu: Element) -> str:
    """Of the memory since the driver was loaded. Elements that count them have `uncorrectable` in their names."""
    counts = gpu.find("ecc_errors/volatile")
    total = sum(_number(one.text) for one in counts if "uncorrectable" in one.tag) if counts is not None else 0
    return f"{total} uncorrectable errors of the memory" if total else ""


def _rows(gpu: Element) -> str:
    if _text(gpu, "remapped_rows/remapped_row_failure") == "Yes":
        return "a row of the memory could not be remapped"
    pending = ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement")
    return "a remapping of the memory waits for a reset" if any(_text(gpu, path) == "Yes" for path in pending) else ""


def _ecc(gpu: Element) -> str:
    return "ECC is off" if _text(gpu, "ecc_mode/current_ecc") == "Disabled" else ""


def _mig(gpu: Element) -> str:
    return "divided by MIG" if _text(gpu, "mig_mode/current_mig") == "Enabled" else ""


def _throttled(gpu: Element) -> str:
    reasons = gpu.find("clocks_event_reasons")
    active = [one.tag for one in reasons if (one.text or "").strip() == "Active"] if reasons is not None else []
    return ", ".join(dict.fromkeys(said for name, said in _SLOW.items() if f"clocks_event_reason_{name}" in active))


def _occupied(gpu: Element) -> str:
    used = _number(_text(gpu, "fb_memory_usage/used"))
    names = sorted({_text(one, "process_name") or "?" for one in gpu.findall("processes/process_info")})
    by = f" by {', '.join(names)}" if names else ""
    return f"{used:,} MiB in use{by}" if used > _BUSY else ""


def _fabric(gpu: Element) -> str:
    state = _text(gpu, "fabric/state")
    return "" if state in ("", "N/A", "Completed") else f"NVSwitch: {state}"


_CHECKS: list[tuple[str, Level, str, str, Callable[[Element], str]]] = [
    ("GPU memory errors", "fault", "none since the driver was loaded", "reset the GPU, or drain the node", _errors),
    ("GPU memory rows", "fault", "no remapping that failed or waits", "reset the GPU, or replace it", _rows),
    ("GPU ECC", "warning", "errors of the memory are corrected", "nvidia-smi -e 1, then a reboot", _ecc),
    ("GPU slices", "warning", "whole GPUs, which NCCL can join", "nvidia-smi -mig 0", _mig),
    ("GPU clocks", "warning", "full clocks", "look at the cooling and the power supply", _throttled),
    ("GPU memory", "warning", "free GPUs", "see who uses them with nvidia-smi, and end that", _occupied),
    ("GPU fabric", "fault", "Completed", "start the fabric manager: systemctl start nvidia-fabricmanager", _fabric),
]


def _text(gpu: Element, path: str) -> str:
    return gpu.findtext(path, "").strip()


def _number(text: str | None) -> int:
    """Of "50 MiB" or "3"; 0 where nothing is counted."""
    words = (text or "").split()
    return int(words[0]) if words and words[0].isdigit() else 0
