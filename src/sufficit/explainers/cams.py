"""Class activation maps [N,h,w] from features [N,K,h,w], their gradients, and logits [N,C]."""

import torch
from torch import Tensor
from torch.nn import functional as F

_ROUNDS = 7  # of an eighth power each: enough for two eigenvalues 0.00001 apart
_FLAT = 1e-12  # smaller differences of a kernel between cells are rounding


def gradcam(features: Tensor, gradients: Tensor) -> Tensor:
    """Return channels weighted by their mean gradient (Selvaraju et al. 2017, equations 1 and 2).

    >>> features = torch.tensor([[[[1.0, 2.0]], [[3.0, 5.0]]]])
    >>> gradients = torch.tensor([[[[0.5, 1.5]], [[-1.0, 0.0]]]])
    >>> gradcam(features, gradients)                        # 1 * (1, 2) - 0.5 * (3, 5)
    tensor([[[-0.5000, -0.5000]]])
    """
    return _weighted(features, gradients.mean((2, 3)))


def gradcam_plus_plus(features: Tensor, gradients: Tensor) -> Tensor:
    """Return channels weighted by positive gradients (Chattopadhay et al. 2018, equation 19)."""
    squares = gradients.square()
    sums = features.sum((2, 3), keepdim=True)
    cubes = squares * gradients
    shares = squares / (2 * squares + sums * cubes + 1e-6)  # grad-cam's epsilon
    return _weighted(features, (gradients.clamp(min=0) * shares).sum((2, 3)))


def layercam(features: Tensor, gradients: Tensor) -> Tensor:
    """Return each cell weighted by its own positive gradient (Jiang et al. 2021, equation 6).

    >>> features = torch.tensor([[[[1.0, 2.0]], [[3.0, 5.0]]]])
    >>> gradients = torch.tensor([[[[0.5, 1.5]], [[-1.0, 1.0]]]])
    >>> layercam(features, gradients)                       # (0.5, 3) + (0, 5)
    tensor([[[0.5000, 8.0000]]])
    """
    return (gradients.clamp(min=0) * features).sum(1)


def hirescam(features: Tensor, gradients: Tensor) -> Tensor:
    """Return features times gradients, cell by cell (Draelos and Carin 2020, equation 3).

    >>> features = torch.tensor([[[[1.0, 2.0]], [[3.0, 5.0]]]])
    >>> gradients = torch.tensor([[[[0.5, 1.5]], [[-1.0, 1.0]]]])
    >>> hirescam(features, gradients)                       # (0.5, 3) + (-3, 5)
    tensor([[[-2.5000,  8.0000]]])
    """
    return (features * gradients).sum(1)


def _weighted(features: Tensor, weights: Tensor) -> Tensor:
    return (features * weights[:, :, None, None]).sum(1)  # a matrix product could round to TF32


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the logit of each image's target: [N,C], [N] -> [N]."""
    return logits.gather(1, targets[:, None])[:, 0]


def contrast(
    logits: Tensor, targets: Tensor, reading: str = "weighted", nearest: int = 3
) -> Tensor:
    """Return Finer-CAM's score: the target's logit y against the nearest classes': [N,C] -> [N].

    "weighted": the mean of y - 1.0 * y_j, weighted by the softmax of class j. "mean": y - 0.6 * the
    mean of y_j.

    >>> contrast(torch.tensor([[5.0, 1.0, 2.0, 3.0, -9.0]]), torch.tensor([0]), "mean")  # 5 - 1.2
    tensor([3.8000])
    """
    others = nearest_classes(logits, targets, nearest)
    own = target_logits(logits, targets)
    near = logits.gather(1, others)
    if reading == "mean":
        return own - 0.6 * near.mean(1)
    weights = logits.softmax(1).gather(1, others)
    return (weights * (own[:, None] - near)).sum(1) / (weights.sum(1) + 1e-9)  # grad-cam's epsilon


def nearest_classes(logits: Tensor, targets: Tensor, count: int = 3) -> Tensor:
    """Return the classes whose logits are nearest to the target's: [N,C], [N] -> [N,count].

    >>> nearest_classes(torch.tensor([[5.0, 1.0, 2.0, 6.0]]), torch.tensor([0]), 2)
    tensor([[3, 2]])
    """
    distances = (logits.detach() - target_logits(logits.detach(), targets)[:, None]).abs()
    distances = distances.scatter(1, targets[:, None], -1)  # the target comes first, also in a tie
    return distances.sort(dim=1, stable=True).indices[:, 1 : count + 1]


def eigencam(features: Tensor) -> Tensor:
    """Return the first principal component of the features: [N,K,h,w] -> [N,h,w], of unit length.

    Muhammad and Yeasin 2020; as in grad-cam the channels are centred over the cells first.
    """
    return _component(centred_kernels(features, sigmoid=False), features)


def kpca_cam(features: Tensor) -> Tensor:
    """Return the first component of the cells' sigmoid kernel: [N,K,h,w] -> [N,h,w], of length 1.

    As grad-cam (scikit-learn's KernelPCA) computes it: channels centred over the cells, kernel
    tanh(x.y / K + 1).
    """
    return _component(centred_kernels(features), features)


def _component(kernels: Tensor, features: Tensor) -> Tensor:
    """Return the first eigenvector of each kernel between cells: [N,hw,hw] -> [N,h,w].

    Its sign is free: here, as in grad-cam, the entry farthest from zero is positive. Features that
    are the same in every cell give zeros, NaN gives NaN.
    """
    flat = kernels.abs().amax((1, 2))[:, None] <= _FLAT
    on_cpu = kernels.device.type == "cpu"
    components = by_solver(kernels) if on_cpu else by_powers(kernels)
    return components.masked_fill(flat, 0).view(-1, *features.shape[2:]).to(features.dtype)


def centred_kernels(features: Tensor, *, sigmoid: bool = True) -> Tensor:
    """Return the kernel between the cells of each image, centred: [N,K,h,w] -> [N,hw,hw]."""
    # Apple's GPUs have no doubles.
    exact = torch.float32 if features.device.type == "mps" else torch.float64
    cells = features.flatten(2).to(exact)
    cells = cells - cells.mean(2, keepdim=True)
    if sigmoid:
        one = cells.new_ones(1)
        kernels = torch.baddbmm(one, cells.mT, cells, alpha=1 / features.shape[1]).tanh()
    else:
        kernels = cells.mT @ cells
    kernels = kernels - kernels.mean(2, keepdim=True)
    return kernels - kernels.mean(1, keepdim=True)


def by_solver(matrices: Tensor) -> Tensor:
    """Return eigenvectors of the largest eigenvalues, farthest entry positive: [N,P,P] -> [N,P].

    >>> by_solver(torch.tensor([[[0.0, 3.0], [3.0, -8.0]]]))               # eigenvalues 1 and -9
    tensor([[0.9487, 0.3162]])
    """
    _, every = torch.linalg.eigh(matrices.nan_to_num())  # LAPACK raises for NaN
    vectors: Tensor = every[:, :, -1]  # eigenvalues come in ascending order
    farthest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return torch.where(farthest < 0, -vectors, vectors) + 0 * matrices[:, 0]  # NaN stays NaN


def by_powers(matrices: Tensor) -> Tensor:
    """Return the same by powers of all matrices at once, some twenty times faster on a GPU.

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
