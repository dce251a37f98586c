"""The engine: where DeepSpeed is wrong or behaves unexpectedly, what a run checks at its start, and its steps."""

import contextlib
import io
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import offload_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from data_pipeline.base.config_file import Section, check
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.config import RunConfig, deepspeed_keys
from pretrain.config.run_config import ComputeSection
from pretrain.engine import deepspeed_private
from pretrain.engine.deepspeed_private import check_layout
from pretrain.engine.engine import in_evaluation
from pretrain.run import watchdog
from pretrain.training.run import configure_arithmetic
from tests.support.plain_loop import ExactModel, sgd
from tests.support.rank_processes import each as each_on_ranks
from tests.support.rank_processes import on_ranks
from tests.support.small_runs import (
    engine_of,
    micro_batches,
    own_layout,
    own_sharding,
    row_offsets,
    run_config,
    trained,
)
from tests.support.tables import each

STAGE_3 = {"stage": 3}


WRONG = [
    ({"zero_optimisation": STAGE_3}, "zero_optimisation: unknown key; nearest valid key: zero_optimization"),
    ({"fp16": {"enabled": True}}, "fp16: not supported: T5 diverges in fp16; set precision: bf16"),
    ({"elasticity": {}}, "elasticity: DeepSpeed ignores this key, or has removed it"),
    ({"wall_clock_breakdown": True}, "wall_clock_breakdown: set trainer.profile instead"),
]
NEAREST = "unknown key; nearest valid key: zero_optimization"
WRONG_ZERO = [
    ({"stage": 0}, ".stage: expected integer ≥ 1, ≤ 3, got 0"),
    ({"stage": 4}, ".stage: expected integer ≥ 1, ≤ 3, got 4"),
    *(
        ({key: value}, f".{key}: the stage and the device decide how gradients are reduced; remove this key")
        for key, value in {
            "overlap_comm": False,
            "reduce_bucket_size": 1000,
            "reduce_scatter": True,
            "contiguous_gradients": True,
            "use_multi_rank_bucket_allreduce": True,
        }.items()
    ),
    ({"memory_efficient_linear": 2}, ".memory_efficient_linear: expected true or false, got 2"),
    ({"stage3_max_reuse_distance": -1}, ".stage3_max_reuse_distance: expected integer ≥ 0, got -1"),
    ({"round_robin_gradients": True}, ".round_robin_gradients: DeepSpeed maps"),
    ({"allgather_bucket_sise": 1}, f".allgather_bucket_sise: {NEAREST}.allgather_bucket_size"),
    ({"offload_param": {"device": "cpu"}}, ": offload_param.device: cpu needs stage 3"),
    (
        {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
        ": offload_optimizer.device: nvme needs stage 3",
    ),
    ({**STAGE_3, "offload_optimizer": {"device": "nvme"}}, ".offload_optimizer: nvme_path: missing"),
    (
        {**STAGE_3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        ".offload_optimizer.ratio: works only with optimizers of DeepSpeed's own",
    ),
    ({"offload_optimizer": {"devise": "cpu"}}, f".offload_optimizer.devise: {NEAREST}.offload_optimizer.device"),
]


@each(
    "given, expected",
    [*WRONG, *(({"zero_optimization": zero}, f"zero_optimization{said}") for zero, said in WRONG_ZERO)],
)
def test_a_key_that_contradicts_or_does_nothing_is_refused(given, expected):
    with pytest.raises(UserError) as error:
        check(given, deepspeed_keys.DeepSpeedSection, "run.yaml")
    (found,) = str(error.value).splitlines()
    assert found.startswith(f"run.yaml: {expected}")


def test_all_problems_are_told_at_once_each_in_a_line():
    deepspeed = {"optimizer": {}, "bf16": {}, "zero_optimization": {"stage": 0, "stages": 2}}
    with pytest.raises(UserError) as error:
        check({**run_config().model_dump(), "deepspeed": deepspeed}, RunConfig, "run.yaml")
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("run.yaml: deepspeed.") for line in lines)


def test_other_keys_are_passed_on_and_the_stage_has_a_default_and_must_be_a_number():
    cases = [
        ({}, {}),
        ({"parameter_alignment": True, "stage3_max_live_parameters": 10}, {"aio": {}}),
    ]
    for zero, others in cases:
        section = run_config(deepspeed={"zero_optimization": zero, **others}).deepspeed.model_dump()
        assert section == {"zero_optimization": {**zero, "stage": 1}, **others}
    for wrong, said in ((True, r": stage: expected a number, got true"), ("2", r"\.stage: expected integer .*, got")):
        values = {**run_config().model_dump(), "deepspeed": {"zero_optimization": {"stage": wrong}}}
        with pytest.raises(UserError, match=r"deepspeed\.zero_optimization" + said):
            check(values, RunConfig, "run.yaml")


class Asked(dict[str, Any]):
    """A section that records which keys were looked up in it."""

    keys_asked: ClassVar[set[str]] = set()

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def known_keys(section: type[Section]) -> set[str]:
    return {*section.model_fields, *section.refused}


OFFLOADING = (
    (deepspeed_keys.OptimizerOffloadSection, offload_config.DeepSpeedZeroOffloadOptimizerConfig),
    (deepspeed_keys.ParameterOffloadSection, offload_config.DeepSpeedZeroOffloadParamConfig),
)


def test_every_key_that_deepspeed_knows_is_decided_on():
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig

    DeepSpeedConfig(Asked(train_batch_size=1))
    assert Asked.keys_asked <= known_keys(deepspeed_keys.DeepSpeedSection)
    assert _REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= deepspeed_keys.DeepSpeedSection.refused.keys()
    fields = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    removed = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
    assert deepspeed_keys.ZeroSection.model_fields.keys() <= fields
    assert fields | removed <= known_keys(deepspeed_keys.ZeroSection)
    assert not fields & removed
    for ours, theirs in OFFLOADING:
        assert ours.model_fields.keys() <= theirs.model_fields.keys() <= known_keys(ours)
        fields |= theirs.model_fields.keys()
    top = Asked.keys_asked | _REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() | {"sequence_parallel_size"}  # read by initialize
    assert deepspeed_keys.PassedOn.refused.keys() <= top | fields | removed


def test_the_defaults_in_the_reference_are_deepspeeds():
    stated = {name: value for name, value in deepspeed_keys.ZeroSection() if name != "stage"}
    found = {field.alias or name: field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert stated == {name: found[name] for name in stated}
    for ours, theirs in OFFLOADING:
        assert dict(ours()) == {key: theirs.model_fields[key].default for key, _ in ours()}


def buffer_after_initialize(stage: int) -> list[float]:
    from pretrain.engine.engine import Engine

    model = ExactModel()
    model.inputs.fill_(dist.get_rank() + 1 / 3)
    config = run_config(stage, precision="bf16")
    engine = Engine.initialize(model, config, own_sharding(config), optimizer=sgd(model))
    found = engine.deepspeed.module.inputs
    engine.close()
    return [found.dtype == torch.float32, *found.unique().tolist()]


def test_buffers_are_those_of_rank_0_and_keep_their_precision():
    """DeepSpeed broadcasts only parameters."""
    expected = [True, torch.tensor(1 / 3).item()]
    assert on_ranks(2, each_on_ranks, buffer_after_initialize, [(1,), (3,)]) == [[expected] * 2] * 2


def norms_and_output(stage: int) -> tuple[list[float], str]:
    """The gradient norms of three steps, and what is printed meanwhile."""
    norms = []
    with contextlib.redirect_stdout(io.StringIO()) as told:
        engine = engine_of(run_config(stage, precision="bf16", optimizer={"learning_rate": 1e-9}))
        for step in range(3):
            engine.step(step, row_offsets(own_layout(), step), micro_batches(own_layout(), step))
            norms.append(engine.gradient_norm)
    engine.close()
    return norms, told.getvalue()


def test_gradients_of_bf16_models_are_accumulated_and_reduced_in_fp32_and_nothing_is_told_on_stdout():
    """DeepSpeed's default is bf16, which changes the norm of the gradient by more; in fp32 all stages agree. At stage 1
    it would print its memory at each point of its construction."""
    norms, told = zip(*on_ranks(2, each_on_ranks, norms_and_output, [(1,), (2,), (3,)])[0], strict=True)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] == pytest.approx(norms[2], rel=1e-5)
    assert told == ("", "", "")


def shared_memory() -> list[str]:
    """The shared memory segments of DeepSpeed's collectives that this process has mapped."""
    dist.all_reduce(torch.ones(1))
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/deepspeed" in line]


def test_ranks_on_a_cpu_take_no_shared_memory():
    """DeepSpeed's own collectives for CPU ranks would take 69 MB per rank on joining, and never free it."""
    assert on_ranks(2, shared_memory) == [[], []]


# What this project assumes of DeepSpeed beyond its documentation is checked when a run starts.


CASES: list[tuple[int, str, dict[str, Any] | None]] = [
    *((stage, precision, None) for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
    (2, "fp32", {"offload_optimizer": {"device": "cpu"}}),
    (3, "bf16", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
]


@pytest.mark.slow
def test_other_weights_and_lost_fragments_are_noticed():
    """Two ranks, two steps, every stage: first nothing is wrong, then a weight differs, then, at stages 1 and 2, a
    parameter isn't where DeepSpeed keeps them all."""
    for of_rank in on_ranks(2, each_on_ranks, complaints_of, CASES):
        for case, (differing, lost) in zip(CASES, of_rank, strict=True):
            assert "fp32 weights are not those that the model computes with" in differing, case
            assert case[0] == 3 or "doesn't keep embedding.weight where it is expected" in lost, case


def complaints_of(stage: int, precision: str, zero: dict[str, Any] | None) -> tuple[str, str]:
    config = run_config(stage, zero=zero, precision=precision)
    layout = own_layout()
    engine = engine_of(config)
    for step in range(2):
        engine.step(step, row_offsets(layout, step), micro_batches(layout, step))
    check_layout(engine.deepspeed)
    parameter = next(engine.module.parameters())
    live: torch.Tensor = getattr(parameter, "ds_tensor", parameter).data.view(-1)
    live += 1.0
    differing = refusal(engine)
    live -= 1.0
    if stage == 3:
        return differing, ""
    parameter.data = parameter.data.clone()
    return differing, refusal(engine)


def refusal(engine: Any) -> str:
    with pytest.raises(FailedError) as error:
        check_layout(engine.deepspeed)
    return str(error.value)


def test_an_untested_version_is_refused_with_what_to_install(monkeypatch):
    for tested in (deepspeed_private.TESTED, f"{deepspeed_private.TESTED}+cu130"):
        monkeypatch.setattr(deepspeed, "__version__", tested)
        deepspeed_private.check_version()
    for other in ("0.9.10", "0.19.7", "0.20.0"):
        monkeypatch.setattr(deepspeed, "__version__", other)
        with pytest.raises(UserError) as error:
            deepspeed_private.check_version()
        said = f"deepspeed {other} is installed; supported: {deepspeed_private.TESTED}; "
        assert str(error.value) == f"{said}install it with: pip install deepspeed=={deepspeed_private.TESTED}"


# A step of the engine is skipped on all ranks or on none


SETTINGS = list(itertools.product((1, 2, 3), ("fp32", "bf16")))


def train_through_trouble() -> dict[Any, Any]:
    """The outcomes of five steps and the final parameters, by (stage, precision, whether the last rank is in
    trouble)."""
    layout = own_layout(4 // dist.get_world_size())
    return {
        (*setting, troubled): _through({1: "gradient", 3: "loss"} if troubled else {}, layout, *setting)
        for setting, troubled in itertools.product(SETTINGS, (False, True))
    }


def _through(
    troubles: dict[int, str], layout: BatchLayout, stage: int, precision: str
) -> tuple[list, dict[str, torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param

    engine = engine_of(run_config(stage, precision=precision))
    trouble = ""

    def spoil(module: torch.nn.Module, _: Any, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if layout.rank == layout.ranks - 1 and trouble == "gradient":
            return {name: value * float("nan") for name, value in losses.items()}
        if layout.rank == layout.ranks - 1 and trouble == "loss":  # its gradient is the usual one
            return {name: value + float("inf") for name, value in losses.items()}
        return losses

    engine.deepspeed.module.register_forward_hook(spoil)
    outcomes: list = []
    while sum(outcome.applied for outcome in outcomes) < 3:
        trouble = troubles.get(len(outcomes), "")
        applied = sum(outcome.applied for outcome in outcomes)
        outcomes.append(engine.step(applied, row_offsets(layout, applied), micro_batches(layout, applied)))
    parameters = {
        name: safe_get_full_fp32_param(parameter).to("cpu", copy=True)
        for name, parameter in engine.deepspeed.module.named_parameters()
    }
    engine.close()
    return outcomes, parameters


@pytest.mark.slow
def test_a_step_without_a_finite_loss_or_gradient_is_skipped_on_every_rank(device):
    """Holds at every stage, in fp32 and bf16; later steps are bitwise as if the step had never been."""
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    for of_rank, setting in itertools.product(
        on_ranks(ranks, train_through_trouble, device=device, seconds=600), SETTINGS
    ):
        outcomes, parameters = of_rank[*setting, True]
        expected, wanted = of_rank[*setting, False]
        assert [outcome.applied for outcome in outcomes] == [True, False, True, False, True], setting
        assert [outcome.loss for outcome in outcomes if outcome.applied] == [outcome.loss for outcome in expected]
        assert all(torch.equal(parameters[name], wanted[name]) for name in wanted), setting


def outcome_of_a_step() -> tuple[list[float], dict[str, bool], tuple[float, int], float, list[int], float]:
    """The learning rates before and after the first step, its votes, its sum of losses, its loss, the steps that the
    watchdog is told of, and the sum of this rank's losses before."""
    layout, engine = own_layout(), engine_of(run_config(1))
    own = sum(float(engine.losses(batch)["labels"].sum()) for batch in micro_batches(layout, 0))
    rates = [engine.learning_rate]
    votes = {"all": True, "one": dist.get_rank() == 0, "none": False}
    with pytest.MonkeyPatch.context() as patch:
        told: list[int] = []
        patch.setattr(watchdog, "mark", lambda *step: told.extend(step))
        outcome = engine.step(0, row_offsets(layout, 0), micro_batches(layout, 0), votes)
    rates.append(engine.learning_rate)
    engine.close()
    return rates, outcome.votes, outcome.losses["labels"], outcome.loss, told, own


def test_a_step_has_the_mean_loss_of_all_labels_and_the_votes_of_any_rank():
    """On two ranks, each with two micro-batches of two rows of eight labels."""
    of_ranks = on_ranks(2, outcome_of_a_step)
    expected = sum(own for *_, own in of_ranks)
    for rates, votes, (total, labels), loss, told, _ in of_ranks:
        assert rates == [0.0, 1e-2]
        assert votes == {"all": True, "one": True, "none": False}
        assert (labels, loss) == (64, pytest.approx(total / 64, rel=1e-12))
        assert total == pytest.approx(expected, rel=1e-6)
        assert 3 < loss < 7  # near ln 100
        assert told == [1]


def test_after_an_evaluation_each_part_is_in_the_mode_that_it_was_in():
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    module[1].eval()
    before = [part.training for part in module.modules()]
    assert before == [True, True, False]
    with in_evaluation(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == before


# What PyTorch and CUDA's libraries are asked for before they touch a GPU


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")


def settled(compute: ComputeSection, environment: dict[str, str]) -> tuple[dict[str, str], bool, bool, list[float]]:
    """The environment afterwards, whether products are in TF32, whether algorithms are deterministic, and losses."""
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    configure_arithmetic(compute)
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return found, tf32, torch.are_deterministic_algorithms_enabled(), trained(2)


def test_tf32_and_determinism_are_asked_for_only_where_the_run_file_does():
    plain, exact, users = (
        on_ranks(1, settled, compute, environment)[0]
        for compute, environment in (
            (ComputeSection(), {}),
            (ComputeSection(deterministic=True, tf32=True), {}),
            (ComputeSection(deterministic=True), {"NCCL_ALGO": "Tree", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        )
    )
    growing = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert plain[:3] == (growing, False, False)
    ordered = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    assert exact[:3] == ({**growing, **ordered}, True, True)
    assert users[0] == {**ordered, "NCCL_ALGO": "Tree", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    assert plain[3] == exact[3] == users[3]  # a CPU always repeats, and no operation of a step is refused


def test_compiled_kernels_are_kept_on_the_nodes_disk_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    def caches(**environment: str) -> list[str]:
        monkeypatch.setattr(os, "environ", environment)
        configure_arithmetic(ComputeSection())
        return [environment[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]

    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    cache = f"{tmp_path}/encdec-pretrain-kernels-{os.getuid()}"
    assert caches() == [f"{cache}/triton", f"{cache}/inductor"]
    assert Path(cache).stat().st_mode & 0o077 == 0
    assert caches(TRITON_CACHE_DIR="/users") == ["/users", f"{cache}/inductor"]


@each("trap", ["link", "file", "writable", "another user's"])
def test_compiled_kernels_are_never_loaded_from_a_folder_that_another_user_may_write_to(monkeypatch, tmp_path, trap):
    usual, elsewhere = tmp_path / f"encdec-pretrain-kernels-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if trap == "link":
        usual.symlink_to(elsewhere)
    elif trap == "file":
        usual.touch()
    else:
        usual.mkdir()
        usual.chmod(0o777 if trap == "writable" else 0o755)
    if trap == "another user's":
        monkeypatch.setattr(os, "getuid", lambda owner=os.getuid(): owner + 1)
        usual.rename(tmp_path / f"encdec-pretrain-kernels-{os.getuid()}")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", {})
    before = {*tmp_path.iterdir()}
    configure_arithmetic(ComputeSection())
    (new,) = {*tmp_path.iterdir()} - before
    assert os.environ["TRITON_CACHE_DIR"] == f"{new}/triton"
    assert new.stat().st_mode & 0o077 == 0


def test_the_folder_of_compiled_kernels_is_closed_to_the_group(monkeypatch, tmp_path):
    """As an earlier version made it with the umask 002."""
    usual = tmp_path / f"encdec-pretrain-kernels-{os.getuid()}"
    usual.mkdir()
    usual.chmod(0o775)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", {})
    configure_arithmetic(ComputeSection())
    assert os.environ["TRITON_CACHE_DIR"] == f"{usual}/triton"
    assert usual.stat().st_mode & 0o777 == 0o700


def test_ranks_of_a_node_share_its_cores_when_they_compile(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))

    def threads(**environment: str) -> str:
        monkeypatch.setattr(os, "environ", environment)
        configure_arithmetic(ComputeSection())
        return environment["TORCHINDUCTOR_COMPILE_THREADS"]

    assert [threads(LOCAL_SIZE="8"), threads(LOCAL_WORLD_SIZE="4"), threads()] == ["8", "16", "32"]
    assert threads(LOCAL_SIZE="8", TORCHINDUCTOR_COMPILE_THREADS="2") == "2"
