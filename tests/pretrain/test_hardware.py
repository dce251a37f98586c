"""Which GPUs count, compared with PyTorch's own reading of CUDA_VISIBLE_DEVICES."""

import os
import re
import subprocess
import sys
from itertools import takewhile

import pynvml
import pytest
import torch

from data_pipeline.base.errors import UserError
from launch.agent import ranks_environment
from pretrain import hardware
from pretrain.engine import ranks
from pretrain.hardware import count_gpus, cpu_multiplies_bf16, device_type, local_gpu, rank_threads
from pretrain.run import slurm
from pretrain.run.rank_environment import RankEnvironment, local_world_size, rank_environment
from tests.support.tables import each


@pytest.fixture(autouse=True)
def _nothing_is_asked_for_and_no_driver_is_here(monkeypatch):
    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", absent)


INDICES = [
    "",
    " 0, 1",
    *["-1", "0", "0,1", "1,0", "2", "0,2,1", "0,-1,1", "0,,1", "0,0", "none", "0,GPU-1f", "NoDevFiles"],
]
UUIDS = {
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6": 1,
    "GPU-8932f937,GPU-1a2b3c4d": 2,
    "GPU-8932f937,GPU-8932f937": 0,
    "GPU-8932f937,1": 1,
    "MIG-GPU-8932f937/1/0,MIG-GPU-8932f937/2/0": 1,  # a process sees one instance
}


@each("chosen", [*INDICES, *UUIDS])
def test_indices_and_uuids_choose_gpus_as_cuda_and_pytorch_read_them(chosen, tmp_path, monkeypatch):
    """The machine has two GPUs."""
    assert count_gpus(tmp_path) == 0  # none yet
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    read = takewhile(lambda index: index < 2, torch.cuda._parse_visible_devices() if chosen in INDICES else ())
    assert count_gpus(tmp_path) == UUIDS.get(chosen, len(list(read)))


def test_the_cpu_may_be_asked_for_beside_gpus(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (device_type(), count_gpus(tmp_path)) == ("cuda", 1)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert (device_type(), count_gpus(tmp_path)) == ("cpu", 0)
    monkeypatch.setenv("DS_ACCELERATOR", "")
    assert (device_type(), count_gpus(tmp_path)) == ("cuda", 1)


@each("asked", ["cuda", "xpu"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, asked):
    monkeypatch.setenv("DS_ACCELERATOR", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ask in (device_type, count_gpus):  # the launcher counts, and would start ranks on the CPU
        with pytest.raises(UserError, match="DS_ACCELERATOR: "):
            ask()


def test_the_driver_counts_gpus_that_have_no_files(tmp_path, monkeypatch):
    """As under WSL."""
    assert count_gpus(tmp_path) == 0
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    assert count_gpus(tmp_path) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert count_gpus(tmp_path) == 2


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees():
    """srun --gpus-per-task=1 shows each rank one GPU, whatever its number."""
    assert [local_gpu(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [local_gpu(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    with pytest.raises(UserError, match="LOCAL_RANK 2: only 2 GPUs are visible"):
        local_gpu(2, 2)


PLACE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@each(
    "name, value, expected",
    [
        ("RANK", "x", "an integer from 0 to 1"),
        ("RANK", "2", "an integer from 0 to 1"),
        ("RANK", "-1", "an integer from 0 to 1"),
        ("WORLD_SIZE", "0", "an integer of 1 or more"),
        ("WORLD_SIZE", "2.0", "an integer of 1 or more"),
        ("LOCAL_RANK", "gpu0", "an integer of 0 or more"),
        ("LOCAL_SIZE", "0", "an integer of 1 or more"),
        ("LOCAL_WORLD_SIZE", "two", "an integer of 1 or more"),
        ("MASTER_PORT", "65536", "an integer from 1 to 65535"),
        ("SLURM_NTASKS", "x", "an integer of 1 or more"),
    ],
)
def test_a_variable_of_a_launcher_that_is_no_such_number_is_named(monkeypatch, name, value, expected):
    place = {} if name == "SLURM_NTASKS" else PLACE
    for one, given in {**place, name: value}.items():
        monkeypatch.setenv(one, given)
    with pytest.raises(UserError) as error:
        slurm.rank_environment(os.environ) if name == "SLURM_NTASKS" else rank_environment()
    said = f"{name} is {value!r} in the environment; expected {expected}, which a launcher sets; "
    assert str(error.value) == f"{said}without a launcher, unset its variables"


def test_the_place_of_a_rank_is_read(monkeypatch):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    assert rank_environment() == RankEnvironment(1, 2, 1, 1, "10.0.0.1", 29500)


def test_a_rank_is_bound_to_the_cores_beside_its_gpu(tmp_path, monkeypatch):
    """Two sockets of 8 cores with two threads each, as a DGX lists them."""
    for address, cores in {"0000:07:00.0": "0-7,16-23\n", "0000:b7:00.0": "8-15,24-31\n", "0001:00:00.0": "\n"}.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(cores)
    near = ranks.cores_beside("0000:b7:00.0", tmp_path)
    assert near == {*range(8, 16), *range(24, 32)}
    assert ranks.cores_beside("0001:00:00.0", tmp_path) == ranks.cores_beside("none", tmp_path) == set()
    bound = []
    monkeypatch.setattr(hardware.os, "sched_setaffinity", lambda process, cores: bound.append(cores))
    for allowed, expected in (
        (set(range(32)), [near]),
        (set(range(12)), [{8, 9, 10, 11}]),  # a container's
        (set(range(8)), []),  # the scheduler has chosen others
        ({8, 9}, []),  # and these are near already
    ):
        bound.clear()
        monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda process, allowed=allowed: allowed)
        assert ranks.bind_to(near) == bool(expected)
        assert bound == expected
    assert not ranks.bind_to(set())


def test_ranks_of_a_machine_share_its_cores(monkeypatch):
    """GPU ranks too, unless the user has set a number; torchrun has another name for the number of ranks."""
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks_environment(gpus=8, ranks=8)["OMP_NUM_THREADS"] == "2"
    assert ranks_environment(gpus=0, ranks=4)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    for gpus in (0, 8):
        assert ranks_environment(gpus, ranks=8)["OMP_NUM_THREADS"] == "5"
    assert rank_threads(local_world_size()) == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, number in (("LOCAL_WORLD_SIZE", 3), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(name, str(number))
        assert local_world_size() == number
        assert rank_threads(local_world_size()) == 16 // number


WAIT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def as_in_a_new_process(monkeypatch, gpus: int) -> None:
    for name in WAIT:
        monkeypatch.delenv(name, raising=False)
    for cached in (hardware.limit_spinning, hardware.tell_of_spinning):
        cached.cache_clear()
    monkeypatch.setattr(hardware, "count_gpus", lambda: gpus)


@each(
    "given, gpus, expected",
    [
        ({}, 0, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": ""}, 0, {"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": "1000"}),
        ({}, 8, {}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 0, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "INFINITY"}, 0, {"GOMP_SPINCOUNT": "INFINITY"}),
    ],
)
def test_threads_on_the_cpu_hardly_spin_unless_the_user_says_how_they_wait(monkeypatch, given, gpus, expected):
    as_in_a_new_process(monkeypatch, gpus)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    hardware.limit_spinning()
    assert {name: os.environ[name] for name in WAIT if name in os.environ} == expected
    ranks = ranks_environment(gpus, ranks=1)
    assert {name: ranks[name] for name in WAIT if name in ranks} == expected


def test_a_program_that_has_imported_pytorch_is_told_once(monkeypatch, capsys):
    as_in_a_new_process(monkeypatch, gpus=0)
    for _ in range(2):
        hardware.tell_of_spinning()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("import pretrain before torch, or set GOMP_SPINCOUNT=1000")
    hardware.limit_spinning.cache_clear()
    hardware.tell_of_spinning.cache_clear()
    hardware.tell_of_spinning()  # as a process does that inherits the environment
    assert capsys.readouterr().err == ""


@each(
    "first",
    [
        ("-m", "pretrain", "generate", "nowhere", "text"),
        ("-m", "pretrain", "evaluate", "nowhere"),
        ("-m", "pretrain", "train", "configs:runs/quickstart.yaml", "run.directory=/dev/null/run"),
        ("-c", "import pretrain; pretrain.train"),
        ("-c", "import pretrain; pretrain.load"),
    ],
)
def test_pytorch_finds_the_limit_in_every_entry(first):
    """libgomp prints its settings when PyTorch loads it."""
    kept = {name: value for name, value in os.environ.items() if name not in WAIT}
    environment = {**kept, "OMP_DISPLAY_ENV": "VERBOSE", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, *first], env=environment, capture_output=True, text=True, check=False)
    counts = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert counts, done.stderr
    assert set(counts) == {"1000"}


@each(
    "line, expected",
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("Features\t: fp asimd", False),
        ("", False),
    ],
)
def test_a_cpu_has_bf16_if_it_has_instructions_for_its_products(line, expected, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: bf16 in its name\n{line}\nbogomips\t: 1\n")
    assert cpu_multiplies_bf16(tmp_path / "cpuinfo") == expected
    assert not cpu_multiplies_bf16(tmp_path / "absent")
