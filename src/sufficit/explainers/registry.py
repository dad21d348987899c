"""Every method by its name on the command line; a new one is a function and a line here."""

from sufficit.explainers import controls
from sufficit.explainers.cams import gradcam, gradcam_plus_plus, layercam
from sufficit.explainers.entry import Explainer
from sufficit.explainers.finer import finer_cam
from sufficit.explainers.kpca import kpca_cam
from sufficit.explainers.rollout import rolled

EXPLAINERS: dict[str, Explainer] = {
    "gradcam": Explainer("channels weighed by their mean gradient", "gradients", gradcam),
    "gradcam++": Explainer(
        "channels weighed by their positive gradients, higher orders included",
        "gradients",
        gradcam_plus_plus,
    ),
    "layercam": Explainer("each cell weighed by its own positive gradient", "gradients", layercam),
    "kpca-cam": Explainer(
        "first kernel principal component of the features, whatever the class",
        "features",
        kpca_cam,
    ),
    "finer-cam": finer_cam(),
    "rollout": Explainer(
        "attention of all blocks multiplied, whatever the class; for transformers",
        "attention",
        rolled,
    ),
    "random": Explainer("control: uniform noise", "images", controls.random),
    "center": Explainer("control: a hill in the middle", "images", controls.center),
}

CAMS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
