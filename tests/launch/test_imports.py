"""`launch` starts fast."""

import subprocess
import sys


def test_the_launcher_imports_neither_torch_nor_ray():
    code = "import sys, launch.cli, launch.local; print([m for m in ('torch', 'ray', 'deepspeed') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
