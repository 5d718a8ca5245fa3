"""Settings of every test: one torch thread, so that tests on two cores do not slow each other down."""

import torch

torch.set_num_threads(1)
