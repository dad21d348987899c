"""The loader of training images, by its earlier names."""

from sufficit.data.batches import TrainingImages as PictureLoader
from sufficit.data.batches import replace_missing as standing_in
from sufficit.data.loader import OnError
from sufficit.data.splits import Part

__all__ = ["OnError", "Part", "PictureLoader", "standing_in"]
