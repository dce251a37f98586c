"""Everything that uses DeepSpeed: the engine, its config, sharded construction of the model, checkpoints,
optimizers."""
