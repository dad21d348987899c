"""KPCA-CAM: where features differ most, by the first kernel principal component."""

import torch
from torch import Tensor
from torch.nn import functional as F

_ROUNDS = 7  # of an eighth power each: enough for two eigenvalues 0.00001 apart
_FLAT = 1e-12  # smaller differences of a kernel between cells are rounding


def kpca_cam(features: Tensor) -> Tensor:
    """First component of the sigmoid kernel between cells: [N,K,h,w] -> [N,h,w], of unit length.

    As grad-cam (scikit-learn's KernelPCA) computes it: channels centred over the cells, kernel
    tanh(x.y / K + 1). The sign is free: here, as there, the entry farthest from zero is positive.
    Features that are the same in every cell give zeros, NaN gives NaN.
    """
    kernels = centred_kernels(features)
    flat = kernels.abs().amax((1, 2))[:, None] <= _FLAT
    components = top_eigenvectors(kernels).masked_fill(flat, 0)
    return components.view(-1, *features.shape[2:]).to(features.dtype)


def centred_kernels(features: Tensor) -> Tensor:
    """The kernel between the cells of each image, centred: [N,K,h,w] -> [N,hw,hw]."""
    # Apple's GPUs have no doubles.
    exact = torch.float32 if features.device.type == "mps" else torch.float64
    cells = features.flatten(2).to(exact)
    cells = cells - cells.mean(2, keepdim=True)
    one = cells.new_ones(1)
    kernels = torch.baddbmm(one, cells.mT, cells, alpha=1 / cells.shape[1]).tanh()
    kernels = kernels - kernels.mean(2, keepdim=True)
    return kernels - kernels.mean(1, keepdim=True)


def top_eigenvectors(matrices: Tensor) -> Tensor:
    """Unit eigenvector of the largest eigenvalue, farthest entry positive: [N,P,P] -> [N,P].

    >>> top_eigenvectors(torch.tensor([[[0.0, 3.0], [3.0, -8.0]]]))        # eigenvalues 1 and -9
    tensor([[0.9487, 0.3162]])
    """
    return by_solver(matrices) if matrices.device.type == "cpu" else by_powers(matrices)


def by_solver(matrices: Tensor) -> Tensor:
    """The top eigenvectors by LAPACK, matrix by matrix."""
    _, found = torch.linalg.eigh(matrices.nan_to_num())  # LAPACK raises for NaN
    vectors: Tensor = found[:, :, -1]
    farthest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return torch.where(farthest < 0, -vectors, vectors) + 0 * matrices[:, 0]  # NaN stays NaN


def by_powers(matrices: Tensor) -> Tensor:
    """The same by powers of all matrices at once, some twenty times faster on a GPU.

    A high power of a matrix is v v^T of the largest eigenvalue. Its column with the largest
    diagonal entry is a multiple of v, positive where v is farthest from zero. No step waits for
    the device.
    """
    # The shift makes every eigenvalue positive, so that the largest has the largest power.
    shifts = matrices.abs().sum(2).amax(1, keepdim=True)
    powers = matrices + torch.diag_embed(shifts.expand(matrices.shape[:2]))
    for _ in range(_ROUNDS):
        powers = powers / powers.amax((1, 2), keepdim=True).clamp(min=_FLAT)
        for _ in range(3):
            powers = torch.bmm(powers, powers)
    farthest = powers.diagonal(dim1=1, dim2=2).argmax(1)[:, None, None]
    columns = powers.gather(2, farthest.expand(-1, matrices.shape[1], 1))[:, :, 0]
    return F.normalize(columns)
