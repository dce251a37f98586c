"""All that touches DeepSpeed: the engine, its config, sharded construction, where parameters lie."""
