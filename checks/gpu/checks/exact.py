"""One rank under DeepSpeed against a plain loop on the same device, with every optimizer, stage and precision."""

from checks.gpu.report import Report
from pretrain.zero.ranks import process_group
from tests.pretrain import splits
from tests.pretrain.exactness import Case, all_cases, difference

LIMITS = {"fp32": 1e-5, "bf16": 2**-8}  # of parameters; of losses
STEPS = 6


def exactness(report: Report) -> None:
    cases = all_cases()
    cases += [Case("t5", name, 2, offload=True) for name in ("adamw", "adafactor")]
    if report.small:
        cases = [case for case in cases if case.model == "t5" and case.stage != 2]
        report.skip("BART, stage 2 and offloading", "fewer cases on a CPU")
    with process_group(cpu_threads=1, seconds=600):
        for case in cases:
            words = [case.optimizer, f"stage {case.stage}", case.precision, case.model]
            name = ", ".join([*words, "offloaded"] if case.offload else words)
            with report.part(name):
                found = difference(case, STEPS)
                report.fact(name, found)
                report.expect(name, found <= LIMITS[case.precision], found)
        with report.part("splits"):
            wanted = splits.train_plainly(report.device.type)
            found_by_cut = splits.train_cuts()
            for cut in splits.CASES:
                loss, norm, gradient = splits.differences(found_by_cut[cut], wanted)
                name = f"stage {cut[0]}, {cut[1]} micro-batches"
                report.fact(f"splits: {name}", [loss, norm, gradient])
                report.expect(
                    f"splits: {name}", loss < 1e-6 and norm < 1e-5 and gradient < 1e-5, [loss, norm, gradient]
                )
