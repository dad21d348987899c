"""The one table of headings: what every column and curve is called, and what it means."""

from typing import NamedTuple


class Heading(NamedTuple):
    """What a column is called."""

    short: str  # in a terminal and under a heatmap
    long: str  # in the report and over a figure
    meaning: str  # one sentence


ALPHA = "\u03b1"
_AREA = "Area under the score as pixels {}, from the highest heatmap value to the lowest{}."
_CHANGE = "Mean change of the target's probability when {}{}."
_KEPT, _REMOVED = "only the marked pixels are kept", "the marked pixels are removed"
_EQUAL = ", in equal shares of the image"
_OTHERS = "The same through the masks of other classes."

# fmt: off
HEADINGS: dict[str, Heading] = {
    "insertion_pixel": Heading("ins. px", "Insertion (pixel value)", _AREA.format("appear", "")),
    "deletion_pixel": Heading("del. px", "Deletion (pixel value)", _AREA.format("disappear", "")),
    "insertion_percent": Heading("ins. %", "Insertion (%)", _AREA.format("appear", _EQUAL)),
    "deletion_percent": Heading("del. %", "Deletion (%)", _AREA.format("disappear", _EQUAL)),
    "fid_minus_pixel": Heading("Fid- px", "Fid- (pixel value)", _CHANGE.format(_KEPT, "")),
    "fid_plus_pixel": Heading("Fid+ px", "Fid+ (pixel value)", _CHANGE.format(_REMOVED, "")),
    "fid_minus_percent": Heading("Fid- %", "Fid- (%)", _CHANGE.format(_KEPT, _EQUAL)),
    "fid_plus_percent": Heading("Fid+ %", "Fid+ (%)", _CHANGE.format(_REMOVED, _EQUAL)),
    "base_score": Heading("base", "Base score",
        "Whether the region above alpha_min suffices and the rest of the image does not."),
    "mask_penalty": Heading("penalty", "Mask penalty",
        "Share of the image whose heatmap value is at least alpha_min."),
    "msi": Heading("MSI", "MSI", "Base score minus mask penalty, from -2 to 1."),
    "msi_own_best": Heading("own", "MSI, own alpha_min",
        "MSI at the alpha_min that is best for this method alone."),
    "msi_held_out": Heading("held-out", "MSI, held-out fill",
        "MSI with another fill for the hidden pixels."),
    "fill_drop": Heading("drop", "Drop by fill", "MSI minus MSI with the held-out fill."),
    "leak_ratio": Heading("leak", "Leak ratio",
        "Leak divided by its chance level: 1 where the shape of the mask says nothing."),
    "leak": Heading("leak", "Leak",
        "Share of images of other classes that the mask turns into its own class."),
    "leak_chance": Heading("chance", "Leak, chance", _OTHERS),
    "leak_grey": Heading("grey", "Leak on grey",
        "Whether plain grey through the mask becomes the mask's class."),
    "leak_grey_chance": Heading("chance", "Leak on grey, chance", _OTHERS),
    "leak_noise": Heading("noise", "Leak on noise",
        "Share of noise that the mask turns into its own class."),
    "leak_noise_chance": Heading("chance", "Leak on noise, chance", _OTHERS),
    "iou": Heading("IoU", "IoU", "Overlap of the mask with the object's box, over their union."),
    "pointing": Heading("pointing", "Pointing game",
        "Share of images whose highest heatmap value is on the object."),
    "show": Heading("Show", f"Show(>{ALPHA})",
        f"Score of the image where only values above {ALPHA} are kept."),
    "hide": Heading("Hide", f"Hide(>{ALPHA})",
        f"Score of the region above alpha_min where values above {ALPHA} are hidden."),
}
# fmt: on


def heading(column: str) -> Heading:
    """The heading of a column or curve; a metric of the user's own is called by its name.

    >>> heading("msi").short, heading("my_metric").long
    ('MSI', 'my_metric')
    """
    return HEADINGS.get(column, Heading(column, column, ""))
