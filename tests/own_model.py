"""The text of a user's file with a model, for --model python:FILE.py:FUNCTION."""

MODEL = """
import torch
from torch import nn
from sufficit import Classifier

def make():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 3),
    )
    for weights in model.parameters():
        weights.data = torch.randn(weights.shape, generator=generator)
    return Classifier(model, layer="1", classes=["ant", "bee", "cat"])
"""

SIZED = MODEL.replace("import Classifier", "import Classifier, View").replace(
    '"cat"])', '"cat"], view=View((12, 10)))'
)
