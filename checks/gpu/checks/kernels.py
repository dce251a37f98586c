"""This project's kernels: against fp64 in bf16 and fp32, the same bits twice, and in models. On a CPU in Triton's
interpreter, a few.
"""

import itertools

import torch

from checks.gpu.report import Json, Report
from pretrain.models.functional.attention_backends import Window

LENGTHS = ((512, 512), (114, 512), (64, 192), (63, 320), (128, 128))  # (queries, keys)
# Relative L2. bf16 rounds by up to 2⁻⁹: the inputs of the second product of each result, and the result itself.
LIMITS = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
MASKINGS = ("all", "padding", "packed", "nothing")


def kernels(report: Report) -> None:
    from tests.support import attention_cases as cases

    settings: list[Json] = [{"causal": False}, {"causal": True}, {"window": Window(100, 20)}, {"softcap": 2.0}]
    grid = [
        cases.Case(*lengths, d_kv=64, masking=masking, dtype=dtype, **changes)
        for dtype, lengths, changes, masking in itertools.product(LIMITS, LENGTHS, settings, MASKINGS)
    ]
    families = cases.MODELS
    if report.small:
        cases.patch_once()
        grid = [cases.Case(40, 70, masking=masking, **one) for one, masking in zip(settings, MASKINGS, strict=True)]
        families = {"t5": families["t5"]}
        report.skip(
            "bf16, most lengths and families", "tests/pretrain/models/test_kernels.py runs them in the interpreter"
        )
    device = report.device.type
    report.expect("the same bits twice", cases.repeats(device))
    for case in grid:
        with report.part(str(case)):
            errors = cases.errors(case, device)
            report.row("errors", case=str(case), **errors)
            report.expect(str(case), max(errors.values()) < LIMITS[case.dtype], errors)
    for family in families:
        with report.part(family):
            differences = cases.of_model(family, device)
            worst = max(differences, key=lambda name: differences[name])
            report.expect(f"{family}: as without the kernel", differences[worst] < 1e-4, {worst: differences[worst]})
    with report.part("queries that see nothing"):
        largest, finite = cases.of_queries_that_see_nothing(device)
        report.expect("queries that see nothing give 0", largest == 0.0 and finite, [largest, finite])
    with report.part("dropout"):
        report.fact("dropout", cases.dropped(device))
