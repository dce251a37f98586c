"""Checks before the ranks of a run start, so that a problem is reported once, not by each rank."""

import os
import shutil
import sys
from pathlib import Path

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.corpus import MANIFEST, how_to_build
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.engine.checkpoint.directory import all_steps
from pretrain.engine.checkpoint.index import is_valid, newest
from pretrain.hardware import count_gpus
from pretrain.run import metrics_file, restarts, status
from pretrain.run.world import World
from pretrain.training.prepare import PreparedRun, prepare
from pretrain.training.tracking import tracker

NOT_FRESH = "--fresh begins another run; to resume this one, leave it out"
# Files that the directory of each run has, and few other directories: one of them is the first that a start writes.
_FILES = (status.LOCK, status.STATUS, metrics_file.FILE_NAME, restarts.FILE_NAME)
_PATTERNS = (
    "logs/attempt-*",  # of `launch`
    "checkpoints/step-*",  # of a run that was copied
    "slurm/job.sbatch",  # of `launch slurm`
)
_NAMED = 3


def unbuilt(config: RunConfig, folder: Path) -> list[str]:
    """A line for each local corpus of the run that isn't built, with the command that builds it.

    Corpus files are looked for in `folder`, which has the run file, and among the files that ship.
    """
    data = config.data
    named = dict.fromkeys([*(entry.corpus for entry in data.train), *(entry.corpus for entry in data.validation)])
    missing = (name for name in named if "://" not in name and not (Path(name) / MANIFEST).exists())
    return [f"{name}/{MANIFEST}: no such file; {how_to_build(name, [folder])} makes it" for name in missing]


def preflight(
    config: RunConfig, ranks: int, fresh: bool = False, *, folder: Path, may_train: bool = False, here: bool = True
) -> PreparedRun:
    """Checks a run of so many `ranks`, which resumes from its newest checkpoint unless it is `fresh`.

    `may_train`: a process may already train in the run directory. `here`: the ranks will be on this machine, so its
    devices are checked. `folder` has the run file, and perhaps the files of its corpora. Raises UserError with all
    problems, one line each.
    """
    directory = Path(config.run.directory)
    check_directory(directory)
    if fresh:
        check_fresh(config)
    if not may_train:
        status.check_lock(directory)
    if (checkpoints := directory / "checkpoints").exists() and not checkpoints.is_dir():
        raise UserError(f"run.directory: {checkpoints} is no folder; move it away")
    if missing := unbuilt(config, folder):
        raise UserError("\n".join(missing))
    return prepare(
        config,
        World.on_this_node(ranks),
        None if fresh else newest(directory),
        device_problems(config) if here else (),
    )


def unchecked(config: RunConfig, ranks: int, folder: Path) -> bool:
    """True if corpora are missing, so that `preflight` can't check the run yet. A warning on stderr names them.

    Raises UserError for what doesn't depend on the corpora: the run directory, and batches that `ranks` can't share.
    """
    check_directory(Path(config.run.directory))
    missing = unbuilt(config, folder)
    for line in missing:
        print(f"warning: {line}; until then, rows and vocabulary aren't checked", file=sys.stderr)
    if missing and (problems := BatchPlan(config.batch, ranks).problems()):
        raise UserError("\n".join(problems))
    return bool(missing)


def is_finished(run: PreparedRun) -> bool:
    """True if the run has taken its last step and its last checkpoint is valid. A line then says so."""
    if run.finished and run.resume and is_valid(run.resume):
        print(run.nothing_left)
        return True
    return False


def note_death(run: Path) -> None:
    """Before the next start in the directory `run`, records and prints that the run there has died, if its end isn't
    recorded. MLflow learns of the death when it is fed."""
    if found := restarts.record_death(run, max(all_steps(run), default=0)):
        tracker.record_end(run, found.ended)
        print(f"{run}: attempt {found.attempt} {restarts.in_words(found)}", flush=True)


def device_problems(config: RunConfig) -> list[str]:
    """The settings that this machine doesn't support, one line for each key."""
    problems = _gpu_problems(config) if count_gpus() else []
    if config.compute.attention == "triton" and not count_gpus():
        problems.append("compute.attention: triton needs a GPU; set auto")
    cxx = os.environ.get("CXX", "g++")  # where TorchInductor looks
    if config.compute.compile and not count_gpus() and not shutil.which(cxx):
        problems.append(
            f"compute.compile: on a CPU it needs a C++ compiler, and {cxx} isn't found; install g++ or set false"
        )
    zero = config.deepspeed.zero_optimization
    if (on_nvme := zero.offloaded_to("nvme")) or zero.zero_quantized_weights:
        # PyTorch takes 2 s and 190 MB, DeepSpeed 3 s: few runs need them here
        from pretrain.engine.deepspeed_private import can_build_async_io, was_built_with

        if on_nvme and not can_build_async_io():
            problems += [
                f"deepspeed.zero_optimization.{key}.device: nvme needs DeepSpeed's async_io, which can't be built "
                "here: install libaio's headers (libaio-dev) and a C++ compiler, or set cpu"
                for key in on_nvme
            ]
        key = "deepspeed.zero_optimization.zero_quantized_weights"
        if zero.zero_quantized_weights and not count_gpus():
            problems.append(f"{key}: DeepSpeed's quantizer needs a GPU")
        elif zero.zero_quantized_weights and not (_compiles_for_gpus() or was_built_with("quantizer")):
            problems.append(
                f"{key}: DeepSpeed compiles its quantizer at the start, but there is no nvcc; install CUDA's toolkit "
                "and set CUDA_HOME, or set false"
            )
    return problems


def _gpu_problems(config: RunConfig) -> list[str]:
    import torch  # 2 s and 190 MB, which the launcher does without if it can

    if not torch.cuda.is_available():
        cuda, way_out = torch.version.cuda, ""
        built = f"was built for CUDA {cuda}" if cuda else "was built without CUDA"
        if cuda and cuda.startswith("13."):
            wheel = f"torch=={torch.__version__.partition('+')[0]}+cu126"
            install = f"pip install {wheel} --index-url https://download.pytorch.org/whl/cu126"
            way_out = f"CUDA 13 needs NVIDIA's driver R580 or newer; for an older driver {install}; "
        return [
            f"this machine has GPUs, but PyTorch {torch.__version__} can't use them; it {built} (nvidia-smi shows the "
            f"driver's version); {way_out}DS_ACCELERATOR=cpu in the environment trains on the CPU"
        ]
    if config.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return [f"precision: {torch.cuda.get_device_name()} has no bf16; set fp32"]
    return []


def without_bf16(config: RunConfig) -> RunConfig:
    """`config` with fp32 in place of bf16, for a CPU on which matmuls in bf16 are up to eighty times slower."""
    return config.model_copy(update={"precision": "fp32", "optimizer": config.optimizer.without_bf16()})


def _compiles_for_gpus() -> bool:
    """True if there is nvcc where PyTorch looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return Path(home, "bin/nvcc").exists() or shutil.which("nvcc") is not None


def check_fresh(config: RunConfig) -> None:
    """Raises UserError if `--fresh` would rename the folder that the weights of a new run are in."""
    directory, init_from = Path(config.run.directory), config.checkpoint.init_from
    if init_from and Path(init_from).resolve().is_relative_to(directory.resolve()):
        raise UserError(
            f"checkpoint.init_from: {init_from} is in run.directory, {directory}, which --fresh renames; set another "
            "run.directory"
        )


def check_directory(run: Path) -> None:
    """Raises UserError if `run` is neither new, nor empty, nor the directory of a run."""
    try:
        found = sorted(path.name for path in run.iterdir() if path.name != status.STOP)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UserError(f"run.directory: {run} is no folder; name a new one") from None
    except OSError as error:
        raise UserError(f"run.directory: {run} can't be read: {error.strerror}") from None
    of_a_run = any((run / name).is_file() for name in _FILES) or any(next(run.glob(one), None) for one in _PATTERNS)
    if found and not of_a_run:
        names = ", ".join(found[:_NAMED]) + (", …" if len(found) > _NAMED else "")
        raise UserError(
            f"run.directory: {run} isn't empty and isn't a run: it has {names}; name a new folder, such as "
            f"{run / 'run-1'}"
        )
