"""Everything that uses DeepSpeed: the engine, its config, sharded construction, the layout of parameters."""
