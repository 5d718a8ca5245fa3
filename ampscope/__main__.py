"""`python -m ampscope` is the `ampscope` command."""

from ampscope.cli.main import script

if __name__ == "__main__":
    script()
