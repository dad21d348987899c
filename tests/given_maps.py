"""Heatmaps in place of those that torchcam would draw."""

from contextlib import nullcontext

from torch import Tensor, nn


class Given:
    """An extractor that returns the heatmaps it was made with."""

    def __init__(self, model: nn.Module, heatmaps: Tensor) -> None:
        self.model = model
        self.heatmaps = heatmaps

    def __call__(self, class_idx, scores, **kwargs) -> list[Tensor]:
        return [self.heatmaps]

    def fuse_cams(self, cams: list[Tensor]) -> Tensor:
        return cams[0]

    def _hooks_off(self):
        return nullcontext()
