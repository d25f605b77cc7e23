"""Settings for every test: one thread, since a busy neighbour makes two of them collapse; no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)
