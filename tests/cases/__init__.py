"""Small training scripts, each with one thing wrong (or nothing), and what the diagnosis must say of it.

A case is a module with `TRUTH` (rule, phase, where: module names or (), severity "fault" or "control"), `VARIANTS` (keyword arguments of `main`)
and `main(watch, **variant)`, which returns nothing and may raise `TRUTH["raises"]`. A variant may change the truth: `truth(**variant)`.
"""
