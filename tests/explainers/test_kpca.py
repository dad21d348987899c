"""KPCA-CAM equals scikit-learn's KernelPCA."""

import warnings

import numpy as np
import torch
from sklearn.decomposition import KernelPCA

from sufficit.explainers.kpca import by_powers, by_solver, centred_kernels, kpca_cam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # grad-cam's own imports are not ours to mend


def test_kpca_equals_scikit_learn() -> None:
    features = torch.randn(3, 16, 5, 4, generator=torch.Generator().manual_seed(0)) * 3
    found = kpca_cam(features)
    for maps, wanted in zip(found, features, strict=True):
        cells = wanted.flatten(1).T.double()
        kpca = KernelPCA(n_components=1, kernel="sigmoid")
        theirs = kpca.fit_transform((cells - cells.mean(0)).numpy())
        wanted_map = theirs[:, 0] / np.linalg.norm(theirs)
        assert np.allclose(maps.flatten().numpy(), wanted_map, atol=1e-5)


def test_the_component_farthest_entry_is_positive_and_a_run_repeats() -> None:
    features = torch.randn(8, 6, 4, 4, generator=torch.Generator().manual_seed(0))
    maps = kpca_cam(features).flatten(1)
    assert (maps.amax(1) == maps.abs().amax(1)).all()
    assert torch.equal(kpca_cam(features), kpca_cam(features.flip(0)).flip(0))


def test_the_gpu_way_to_eigenvectors_equals_the_solver() -> None:
    kernels = centred_kernels(
        torch.randn(16, 8, 7, 7, generator=torch.Generator().manual_seed(0)) * 2
    )
    solved, raised = by_solver(kernels), by_powers(kernels)
    assert torch.allclose(solved, raised, atol=1e-6)


def test_features_without_spread_give_zeros_by_kpca() -> None:
    assert torch.equal(kpca_cam(torch.full((2, 3, 4, 4), 0.3)), torch.zeros(2, 4, 4))
