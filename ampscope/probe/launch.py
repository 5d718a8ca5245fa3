"""Which process of which launch this is."""

from __future__ import annotations

import hashlib
import os
import secrets

import torch

VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
"""What launchers set alike in all ranks."""


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world size): from torch.distributed if it is initialised, else from RANK and WORLD_SIZE; (0, 1) without."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def launch_key(world: int) -> str | None:
    """Return what all ranks of one launch, and no other launch, have in common; None for a single process.

    No rank waits for another here: a script may watch in some ranks only.
    """
    if world <= 1:
        return None
    parts = [os.environ.get(name, "") for name in VARIABLES]
    return hashlib.sha256("\0".join([*parts, _shared(), str(world)]).encode()).hexdigest()[:16]


def _shared() -> str:
    """Return a random word that the ranks agree on through torch.distributed's store; "" where there is none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        return bytes(store.compare_set("ampscope/launch", "", secrets.token_hex(8))).decode()
    except (RuntimeError, AttributeError, ValueError):  # a store that cannot do this: the environment has to do
        return ""
