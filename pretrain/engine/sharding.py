"""What ZeRO shards in a run, and who adds up gradients: decided once, from the run file and the number of ranks."""

from dataclasses import dataclass

from pretrain.config import RunConfig


@dataclass(frozen=True)
class Sharding:
    """How a run shards its state.

    Attributes:
        ranks: the number of ranks.
        stage: the ZeRO stage that runs. 1: gradients are whole on each rank. 2: they are sharded. 3: parameters, too.
        reason: why this isn't the stage of the run file; "" if it is.
    """

    ranks: int
    stage: int
    reason: str

    @classmethod
    def of(cls, config: RunConfig, ranks: int, stage: int | None = None) -> "Sharding":
        """`stage`: in place of the stage of `config`.

        One rank has nothing to shard, and in fp32 the backward pass has whole gradients in any case. Gradients are
        sharded where DeepSpeed must reduce them in the backward pass.
        """
        stage = stage or config.zero_stage
        runs, reason = stage, ""
        if config.deepspeed.zero_optimization.offloads:
            runs, reason = max(2, stage), "DeepSpeed reduces the gradients of an offloaded optimizer itself"
        elif ranks == 1:
            runs, reason = 1, "one rank has nothing to shard"
        elif stage == 2 and config.precision == "fp32":
            runs, reason = 1, "in fp32 each rank has whole gradients in any case"
        return cls(ranks, runs, reason if runs != stage else "")

    @property
    def local(self) -> bool:
        """True if each rank adds up the gradients of its micro-batches (`LocalGradients`); otherwise DeepSpeed does."""
        return self.stage == 1

    @property
    def deepspeed_stage(self) -> int:
        """The stage that DeepSpeed gets: in place of 1, whose gradients don't pass through its hooks, the faster 2."""
        return max(2, self.stage)


def ways_to_add_locally(config: RunConfig) -> str:
    """What to change in the run file so that each rank adds up its gradients itself, and ranks may differ in what they
    use."""
    without = ", without offloading" if config.deepspeed.zero_optimization.offloads else ""
    return (
        f"which deepspeed.zero_optimization.stage: {config.zero_stage} in {config.precision} can't add up; set stage "
        f"1, or 2 with precision: fp32{without}, or have the family choose alike on all ranks, by what "
        "Model.begin_step gets"
    )
