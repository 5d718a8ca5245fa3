"""The rules, a few a module. A rule is a function of `Facts` that returns a `Finding` or None; docs/rules.md explains each to a user.

`RULES` lists them in order of blame: where several hold, the earlier is the cause, and `FOLDS` says which of the later ones follow from it.
"""
