"""What an adapter could still gain on each image: gradient steps on its own map.

    method = partial(refine, adapter=lax, steps=100)
    heatmaps = sufficit.explain(classifier, images, method=method)

It is a ceiling, not a way to explain: it asks the model about each image with the terms of a
recipe, so it compares fairly with other methods only under a fill and on a twin it did not ask.
"""

import torch
from torch import Generator, Tensor

from sufficit import Classifier, Lax, resize
from sufficit.training import LaxRecipe, TrainingBatch, take_step

GRADES = LaxRecipe(
    drop=1,
    donors=2,
    power=0.5,
    size=2,
    decide=0.5,
    fills=("black", "colour", "noise", "blurred"),
)
LARGEST = 6.0  # logit of an adapter that gradient steps start from: beyond, they stand still


def refine(
    classifier: Classifier,
    images: Tensor,
    targets: Tensor,
    *,
    adapter: Lax,
    steps: int = 100,
    lr: float = 0.1,
    recipe: LaxRecipe = GRADES,
    seed: int = 0,
) -> Tensor:
    """The map of an adapter after gradient steps on its logits: [N,C,H,W], [N] -> [N,H,W].

    Fills and donors are other images of the batch. Neither adapter nor model changes.
    """
    adapter.check(classifier)
    device = classifier.device
    images, targets = images.to(device), targets.to(device)
    frozen = adapter.to(device).eval()
    layers = frozen.layers or (classifier.feature_layer(images),)
    with torch.inference_mode(False), torch.enable_grad(), classifier.in_eval_mode():
        with torch.no_grad():
            stages, _logits = classifier.stages(images, layers)
            drawn = frozen.logits(stages, targets)
        logits = drawn.clamp(-LARGEST, LARGEST).clone().requires_grad_()
        adam = torch.optim.Adam([logits], lr=lr)
        generator = Generator(device).manual_seed(seed)
        batch = TrainingBatch(images, targets, stages, targets[:, None].expand(-1, 2))
        for _ in range(steps):
            found = take_step(classifier, lambda *_: logits.sigmoid(), batch, recipe, generator)
            # Not backward(), which would leave gradients on the model.
            (logits.grad,) = torch.autograd.grad(found.loss, logits)
            adam.step()
        maps = logits.detach().sigmoid()
    return resize(maps, (images.shape[2], images.shape[3]))
