"""This project's kernels on a GPU: against fp64 in bf16 and fp32, the same bits twice, and in models.

On a CPU their tests run them in Triton's interpreter.
"""

import itertools

import torch

from checks.gpu.report import Report

LENGTHS = ((512, 512), (114, 512), (64, 192), (63, 320), (128, 128))  # (queries, keys)
# Relative L2. bf16 rounds by up to 2⁻⁹: the inputs of the second product of each result, and the result itself.
LIMITS = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
MASKINGS = ("all", "padding", "packed", "nothing")


def kernels(report: Report) -> None:
    if not report.cuda:
        report.skip("attention", "no GPU: tests/pretrain/test_kernels.py runs it in Triton's interpreter")
        return
    from tests.pretrain import attention_cases as cases

    grid = [
        cases.Case(*lengths, d_kv=64, masking=masking, causal=causal, dtype=dtype)
        for dtype, lengths, causal, masking in itertools.product(LIMITS, LENGTHS, (False, True), MASKINGS)
    ]
    report.expect("the same bits twice", cases.repeats("cuda"))
    for case in grid:
        with report.part(str(case)):
            errors = cases.errors(case, "cuda")
            report.row("errors", case=str(case), **errors)
            report.expect(str(case), max(errors.values()) < LIMITS[case.dtype], errors)
    for family in cases.MODELS:
        with report.part(family):
            differences = cases.of_model(family, "cuda")
            worst = max(differences, key=lambda name: differences[name])
            report.expect(f"{family}: as without the kernel", differences[worst] < 1e-4, {worst: differences[worst]})
    with report.part("queries that see nothing"):
        largest, finite = cases.of_queries_that_see_nothing("cuda")
        report.expect("queries that see nothing give 0", largest == 0.0 and finite, [largest, finite])
    with report.part("dropout"):
        report.fact("dropout", cases.dropped("cuda"))
