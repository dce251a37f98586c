"""Whether tests see it when the code decides differently: one place of a module is changed, and its tests run.

    make mutation

The changes, mutants, are those of cosmic-ray's operators: `<` for `<=`, `+` for `-`, 2 for 1, `or` for `and`. A test
that fails has seen the mutant. What no test sees is a gap in the tests, or a change without an effect.
"""
