"""With this folder on PYTHONPATH, ranks do what a test has planned for their steps; see tests/support/steps.py.

Python imports a module of this name before anything else. STEPS has the plan as JSON, in the environment.
"""

import os

if "STEPS" in os.environ and "RANK" in os.environ:
    from tests.support.planting import Planting
    from tests.support.steps import CHANGES

    Planting(CHANGES, lambda module: CHANGES[module.__name__](module)).start()
