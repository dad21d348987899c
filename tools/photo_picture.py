"""Draw the README's photographs: every method's heatmap and its MSI, and why.

python tools/photo_picture.py docs/photos.jpg torchvision:resnet50
python tools/photo_picture.py docs/photos.jpg resnet50_v1_imagenet.safetensors
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from torchvision.models import ResNet50_Weights, resnet50

from sufficit import Classifier, View, evaluate, explain_all
from sufficit.classifier.checkpoint import read_state
from sufficit.data.images import PHOTOS, open_images
from sufficit.plots import Look, save, sheet_figure

METHODS = ("gradcam", "layercam", "finer-cam", "kpca-cam", "center")
SHOWN = ("cat.jpg", "coffee.jpg", "rocket.jpg")


def network(word: str) -> Classifier:
    """A published network, or a ResNet50 whose stages stride in their first convolution."""
    if word.startswith("torchvision:"):
        return Classifier.load(word)
    model = resnet50()
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    state = {name: values.float() for name, values in read_state(Path(word)).items()}
    model.load_state_dict(state, strict=False)
    names = ResNet50_Weights.DEFAULT.meta["categories"]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return Classifier(model.eval(), "layer4", mean, std, classes=names, view=View((224, 224), 256))


def main(path: Path, word: str) -> None:
    """Explain the model's predictions, score, draw."""
    classifier = network(word)
    sources = {image.name: image for image in open_images(PHOTOS)}
    images = torch.stack([sources[name].read(classifier.view) for name in SHOWN])
    with torch.no_grad():
        named = classifier(images).argmax(1)
    maps = explain_all(classifier, images, named, {name: name for name in METHODS})
    scores = {
        name: evaluate(classifier, images, one, named, value_step=0.1, columns=["msi"])
        for name, one in maps.items()
    }
    captions = {name: [f"MSI {value:+.2f}" for value in scores[name].msi] for name in maps}
    assert classifier.classes is not None
    titles = [classifier.classes[k] for k in named.tolist()]
    print(titles, captions)
    figure = sheet_figure(images, maps, titles, captions, look=Look(width=9, font=9))
    drawn = path.with_suffix(".png")
    save(figure, drawn, dpi=100, tight=False)
    with Image.open(drawn) as picture:
        picture.convert("RGB").save(path, quality=88, optimize=True)
    drawn.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
