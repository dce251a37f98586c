"""One rank under DeepSpeed against a plain loop on the same device, with every optimizer, stage and precision."""

import itertools

from checks.gpu.report import Report
from pretrain.zero.ranks import process_group
from tests.pretrain.exactness import Case, all_cases, difference
from tests.pretrain.small_runs import run_config

LIMITS = {"fp32": 1e-5, "bf16": 2**-8}  # of parameters; of losses
STEPS = 6


def exactness(report: Report) -> None:
    cases = all_cases()
    cases += [Case("t5", name, 2, offload=True) for name in ("adamw", "adafactor")]
    if report.small:
        cases = [case for case in cases if case.model == "t5" and case.stage != 2]
        report.skip("BART, stage 2 and offloading", "fewer cases on a CPU")
    with process_group(cpu_threads=1, seconds=600):
        from pretrain.zero.numerics import compare  # DeepSpeed chooses its accelerator when it is imported

        for case in cases:
            words = [case.optimizer, f"stage {case.stage}", case.precision, case.model]
            name = ", ".join([*words, "offloaded"] if case.offload else words)
            with report.part(name):
                found = difference(case, STEPS)
                report.fact(name, found)
                report.expect(name, found <= LIMITS[case.precision], found)
        for stage, accumulation, precision in itertools.product((1, 2, 3), (1, 3), ("fp32", "bf16")):
            name = f"splits: stage {stage}, {accumulation} micro-batches, {precision}"
            with report.part(name):
                found = compare(run_config(stage, precision=precision), accumulation)
                report.fact(name, found.trained)
                report.expect(name, not found.wrong, found.wrong)
