"""Class activation maps from features and their gradients, each [N,K,h,w] -> [N,h,w]."""

from torch import Tensor


def gradcam(features: Tensor, gradients: Tensor) -> Tensor:
    """Channels weighted by their mean gradient (Selvaraju et al. 2017, equations 1 and 2).

    >>> import torch
    >>> features = torch.tensor([[[[1.0, 2.0]], [[3.0, 5.0]]]])
    >>> gradients = torch.tensor([[[[0.5, 1.5]], [[-1.0, 0.0]]]])
    >>> gradcam(features, gradients)                        # 1 * (1, 2) - 0.5 * (3, 5)
    tensor([[[-0.5000, -0.5000]]])
    """
    return _weighted(features, gradients.mean((2, 3)))


def gradcam_plus_plus(features: Tensor, gradients: Tensor) -> Tensor:
    """Channels weighted by their positive gradients (Chattopadhay et al. 2018, equation 19)."""
    squares = gradients.square()
    sums = features.sum((2, 3), keepdim=True)
    cubes = squares * gradients
    shares = squares / (2 * squares + sums * cubes + 1e-6)  # grad-cam's epsilon
    return _weighted(features, (gradients.clamp(min=0) * shares).sum((2, 3)))


def layercam(features: Tensor, gradients: Tensor) -> Tensor:
    """Each cell weighted by its own positive gradient (Jiang et al. 2021, equation 6).

    >>> import torch
    >>> features = torch.tensor([[[[1.0, 2.0]], [[3.0, 5.0]]]])
    >>> gradients = torch.tensor([[[[0.5, 1.5]], [[-1.0, 1.0]]]])
    >>> layercam(features, gradients)                       # (0.5, 3) + (0, 5)
    tensor([[[0.5000, 8.0000]]])
    """
    return (gradients.clamp(min=0) * features).sum(1)


def _weighted(features: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the channels: [N,K,h,w], [N,K] -> [N,h,w]."""
    return (features * weights[:, :, None, None]).sum(1)  # a matrix product could round to TF32
