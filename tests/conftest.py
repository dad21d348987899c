"""Set-up that all tests share."""

import torch

# The tests' models are so small that two threads mostly wait for each other.
torch.set_num_threads(1)
# A GPU's convolutions round to TF32 unless told otherwise, DataParallel's too.
torch.backends.cudnn.allow_tf32 = False
