"""The GPUs of this machine and what joins them, as nvidia-smi shows them."""

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

from data_pipeline.foundation.formatting import counted
from launch.tools.doctor import gpu_health
from launch.tools.doctor.findings import Finding, Settings
from pretrain.hardware.cpu_speed import product_flops
from pretrain.hardware.gpus import gpu_of_device
from pretrain.hardware.machine import ACCELERATOR, VISIBLE, count_gpus, cpu_multiplies_bf16, threads_per_rank

_BRIDGES = {  # nvidia-smi's words for the paths between two GPUs, from the shortest to the longest
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "the PCIe host bridge",
    "NODE": "the host bridges of a CPU socket",
    "SYS": "the link between CPU sockets",
}
_REFUSALS = {  # nvidia-smi's words for why there is no access
    "CNS": "the chipset doesn't support it",
    "GNS": "the GPU doesn't support it",
    "TNS": "their places on the bus don't allow it",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}
_FASTEST_PCIE = 64  # GB/s in one direction; a GPU with a faster link has NVLink


def check(settings: Settings) -> list[Finding]:
    """The GPUs that the ranks would use, by default as many as there are."""
    ranks, number = settings.ranks, count_gpus()
    if number == 0:
        chosen = " and ".join(f"{name}={os.environ[name]}" for name in (ACCELERATOR, VISIBLE) if name in os.environ)
        bf16 = "bf16" if cpu_multiplies_bf16() else "no bf16 (precision: fp32)"
        has = f"{counted(threads_per_rank(1), 'core')}, {product_flops() / 1e9:,.0f} GFLOP/s in fp32 products, {bf16}"
        return [Finding("GPUs", "ok", f"none{f' with {chosen}' if chosen else ''}; ranks run on the CPU: {has}")]
    if ranks and ranks > number:
        return [Finding("GPUs", "fault", f"{number}", f"{ranks}, one for each rank", "ask for fewer ranks")]
    if shutil.which("nvidia-smi") is None:
        return [Finding("GPUs", "warning", f"{number}; nvidia-smi, which would name them, is not on the PATH")]
    shown = _nvidia_smi("-q", "-x")
    if isinstance(shown, Finding):
        return [shown]
    described = ET.fromstring(shown).findall("gpu")
    names = sorted({gpu.findtext("product_name", "").strip() for gpu in described})
    findings = [Finding("GPUs", "ok", f"{len(described)} × {' and '.join(names)}")]
    if len(names) > 1:
        findings = [Finding("GPUs", "warning", findings[0].found, "GPUs of one kind", "the slowest sets the pace")]
    findings += gpu_health.of_gpus(described)
    findings += gpu_health.of_kernel_log(_kernel_log())
    if len(described) > 1:
        matrix, peers = _nvidia_smi("topo", "-m"), _nvidia_smi("topo", "-p2p", "r")
        findings.append(matrix if isinstance(matrix, Finding) else links(names[0], matrix))
        findings.append(peers if isinstance(peers, Finding) else peer_access(peers))
    return findings


def peer_access(matrix: str) -> Finding:
    """Whether each GPU reads the memory of each other, from the output of `nvidia-smi topo -p2p r`."""
    refused = sorted(cells_between(matrix) - {"OK"})
    if not refused:
        return Finding("GPU peer access", "ok", "between all GPUs")
    reasons = ", ".join(_REFUSALS.get(cell, cell) for cell in refused)
    remedy = "NCCL copies through the host's memory; look at the IOMMU and ACS settings of the BIOS"
    return Finding("GPU peer access", "warning", f"some GPUs can't read each other's memory ({reasons})", "all", remedy)


def links(name: str, matrix: str) -> Finding:
    """What joins GPUs called `name`, from the output of `nvidia-smi topo -m`; the longest path counts."""
    paths = paths_between(matrix)
    if not paths:
        return Finding("GPU links", "warning", "nvidia-smi topo -m shows none")
    worst = max(paths, key=lambda path: list(_BRIDGES).index(_kind(path)))
    kinds = ", ".join(sorted(paths))
    gpu = gpu_of_device(name)
    if gpu and gpu.link > _FASTEST_PCIE and _kind(worst) != "NV":
        found = f"some GPUs are joined by {_BRIDGES[_kind(worst)]} ({kinds})"
        expected = f"NVLink between all of them ({gpu.link:g} GB/s)"
        return Finding("GPU links", "warning", found, expected, "look at nvidia-smi nvlink --status")
    return Finding("GPU links", "ok", f"{_BRIDGES[_kind(worst)]} ({kinds})")


def paths_between(matrix: str) -> set[str]:
    """The paths between different GPUs in the output of `nvidia-smi topo -m`, such as NV12 or SYS."""
    return {path for path in cells_between(matrix) if _kind(path) in _BRIDGES}


def cells_between(matrix: str) -> set[str]:
    """What a matrix of nvidia-smi says of pairs of different GPUs."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)  # the header is underlined
    rows = [line.split("\t") for line in plain.splitlines()]
    header = next((row for row in rows if len(row) > 1 and row[0].strip() == ""), [])
    columns = [place for place, cell in enumerate(header) if re.fullmatch(r"GPU\d+", cell.strip())]
    found = {
        row[place].strip()
        for row in rows
        if re.fullmatch(r"GPU\d+", row[0].strip())
        for place in columns
        if place < len(row)
    }
    return found - {"X", ""}


def _kind(path: str) -> str:
    return path.rstrip("0123456789")


def _nvidia_smi(*arguments: str) -> str | Finding:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        remedy = "the driver must work before a run can"
        return Finding("GPUs", "fault", f"nvidia-smi ended with exit code {done.returncode}: {said}", "", remedy)
    return done.stdout


def _kernel_log() -> str:
    """The kernel's messages; none where only the administrator may read them."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True) if shutil.which("dmesg") else None
    return done.stdout if done else ""
