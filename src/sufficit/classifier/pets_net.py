"""The demo's network for photographs: MobileNetV2 for 37 breeds, batch norms folded."""

from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

BREEDS = 37


def pets_net(num_classes: int = BREEDS) -> nn.Module:
    """Build torchvision's MobileNetV2 with its batch norms folded: on a CPU it is twice as fast."""
    from torchvision.models import mobilenet_v2  # slow to import

    return folded(mobilenet_v2(num_classes=num_classes).eval())


def folded(model: nn.Module) -> nn.Module:
    """Fold each batch norm behind a convolution of a Sequential into it, in place.

    Layers keep their names and outputs. The model must be in eval mode.
    """
    for block in model.modules():
        if not isinstance(block, nn.Sequential):
            continue
        for number, (convolution, norm) in enumerate(pairwise([*block])):
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                block[number] = fuse_conv_bn_eval(convolution, norm)
                block[number + 1] = nn.Identity()
    return model
