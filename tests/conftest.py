"""One thread: the tests' models are so small that two threads mostly wait for each other."""

import torch

torch.set_num_threads(1)
