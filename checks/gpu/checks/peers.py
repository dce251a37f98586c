"""A training step of other code on the same rows: transformers' T5, and the form of nanoT5."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from checks.gpu.report import Report
from checks.gpu.workload import Workload, data_sheet_peak, free, seconds_of

FORMS = {"transformers, sdpa": ("sdpa", False), "nanoT5's form": ("eager", True)}
"""By name, the attention of transformers' T5, and whether weights are in fp32 and rounded to bf16 where they are used,
as autocast does it. nanoT5 computes attention as `eager` does, with logits and weights in memory, under autocast."""


def peers(report: Report) -> None:
    """A plain loop with PyTorch's fused AdamW, with as many rows at once as there is memory for."""
    work = Workload(report)
    for name, compiled in itertools.product(FORMS, (False, True)):
        with report.part(f"{name}, {'compiled' if compiled else 'eager'}"):
            rows = work.rows
            while rows and not _measured(report, work, name, compiled, rows):
                report.skip(f"{name}, {rows} rows", "no memory")
                rows //= 2


def _measured(report: Report, work: Workload, name: str, compiled: bool, rows: int) -> bool:
    """Adds a row with the figures of a step; False if there is no memory for it."""
    free(report.device)
    torch.compiler.reset()
    attention, autocast = FORMS[name]
    step, model = _step(report, work, attention, autocast, compiled, rows)
    try:
        seconds = seconds_of(step, report.device, 0.05 if report.small else 1.0, warm=2)
    except torch.OutOfMemoryError:
        return False
    peak = data_sheet_peak(report.device)
    report.row(
        "peers",
        peer=name,
        attention=model.config._attn_implementation,
        compiled=compiled,
        micro_batch=rows,
        ms=1e3 * seconds,
        tokens_per_second=work.tokens / seconds,
        mfu_of_data_sheet=peak and work.flops / seconds / peak,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if report.cuda else None,
    )
    return True


def _step(
    report: Report, work: Workload, attention: str, autocast: bool, compiled: bool, rows: int
) -> tuple[Callable[[], None], Any]:
    """A step, and its model. Each block is compiled by itself: blocks are alike, so that compiling takes seconds."""
    from transformers import T5Config, T5ForConditionalGeneration

    shapes = work.config("eager", rows).model
    config = T5Config(
        vocab_size=shapes.padded_vocab_size,
        num_layers=shapes.num_encoder_layers,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        attn_implementation=attention,
        **{name: getattr(shapes, name) for name in ("d_model", "d_kv", "d_ff", "num_heads", "num_decoder_layers")},
    )
    with report.device:
        model = T5ForConditionalGeneration(config).to(torch.float32 if autocast else torch.bfloat16).train()
    if compiled and report.small:
        report.skip("compiled", "the compiler takes too long on a CPU: blocks are eager")
    for block in [*model.encoder.block, *model.decoder.block] if compiled and report.cuda else ():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [{name: one.to(report.device) for name, one in batch.items()} for batch in work.batches(rows)]

    def step() -> None:
        for batch in batches:
            with torch.autocast(report.device.type, torch.bfloat16) if autocast else nullcontext():
                loss = model(input_ids=batch["encoder_input_ids"], labels=batch["labels"]).loss
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, model
