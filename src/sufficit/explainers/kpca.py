"""KPCA-CAM: where the features differ most, by the first kernel principal component."""

import torch
from torch import Tensor

_ROUNDS = 10  # of a fourth power each: a gap of 0.00001 between two eigenvalues is seen
_FLAT = 1e-12  # an eigenvalue below this share of the cells is rounding


def kpca_cam(features: Tensor) -> Tensor:
    """First component of the sigmoid kernel between cells: [N,K,h,w] -> [N,h,w].

    As grad-cam (scikit-learn's KernelPCA) computes it: channels centred over the cells, kernel
    tanh(x.y / K + 1). A component has no sign of its own: here, as there, its entry farthest from
    zero is positive. Features that are the same in every cell give zeros, NaN gives NaN.
    """
    kernels = centred_kernels(features)
    broken = kernels[:, :1, 0].isnan()  # centring has spread it over the whole matrix
    kernels = kernels.nan_to_num()
    components = top_eigenvectors(kernels)
    eigenvalues = torch.einsum("np,npq,nq->n", components, kernels, components)[:, None]
    flat = eigenvalues <= _FLAT * kernels.shape[1]
    maps = (components * eigenvalues.clamp(min=0).sqrt()).masked_fill(flat, 0)
    maps = maps.masked_fill(broken, torch.nan)
    return maps.view(-1, *features.shape[2:]).to(features.dtype)


def centred_kernels(features: Tensor) -> Tensor:
    """The kernel between the cells of each image, centred: [N,K,h,w] -> [N,hw,hw]."""
    cells = features.flatten(2).mT.to(_exact(features.device))
    cells = cells - cells.mean(1, keepdim=True)
    kernels = (cells @ cells.mT / cells.shape[2] + 1).tanh()
    rows = kernels.mean(2, keepdim=True)
    return kernels - rows - rows.mT + rows.mean(1, keepdim=True)


def top_eigenvectors(matrices: Tensor) -> Tensor:
    """Unit eigenvector of the largest eigenvalue, farthest entry positive: [N,P,P] -> [N,P].

    >>> top_eigenvectors(torch.tensor([[[0.0, 3.0], [3.0, -8.0]]]))        # eigenvalues 1 and -9
    tensor([[0.9487, 0.3162]])
    """
    solver = _by_solver if matrices.device.type == "cpu" else _by_powers
    vectors = solver(matrices)
    farthest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return torch.where(farthest < 0, -vectors, vectors)


def _by_solver(matrices: Tensor) -> Tensor:
    _, vectors = torch.linalg.eigh(matrices)
    last: Tensor = vectors[:, :, -1]
    return last


def _by_powers(matrices: Tensor) -> Tensor:
    """The same where a solver would take one matrix after the other, as on a GPU.

    A high power of a matrix is v v^T of the largest eigenvalue; the column where v v^T has its
    largest diagonal entry is the best conditioned multiple of v. Nothing here waits for the device.
    """
    # The shift makes every eigenvalue positive, so that the largest has the largest power.
    shifts = matrices.abs().sum(2).amax(1)
    powers = _unit_trace(matrices + torch.diag_embed(shifts[:, None].expand(matrices.shape[:2])))
    for _ in range(_ROUNDS):
        powers = _unit_trace(torch.linalg.matrix_power(powers, 4))
    farthest = powers.diagonal(dim1=1, dim2=2).argmax(1)
    columns = powers[torch.arange(len(powers), device=powers.device), :, farthest]
    return torch.nn.functional.normalize(columns, eps=torch.finfo(columns.dtype).tiny)


def _unit_trace(matrices: Tensor) -> Tensor:
    traces = matrices.diagonal(dim1=1, dim2=2).sum(1)
    return matrices / traces.clamp(min=torch.finfo(matrices.dtype).tiny)[:, None, None]


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no doubles
