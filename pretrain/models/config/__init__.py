"""The `model:` section of a run file: one class per family. The launcher reads these too, so torch isn't imported."""
