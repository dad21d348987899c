"""`sufficit export`."""

from typing import Annotated

import typer

from sufficit.cli.console import app, say
from sufficit.cli.options import run_options
from sufficit.files import place
from sufficit.runs.config import RunConfig

OPTIONS = ("model", "weights", "num_classes", "prompts", "output", "size")
DEFAULTS = {"data": "", "checks": ("none",)}


@app.command()
@run_options(*OPTIONS, defaults=DEFAULTS)
def export(
    config: RunConfig,
    adapter: Annotated[str, typer.Argument(help="The folder of an adapter, or lax:NAME.")],
    to: Annotated[str, typer.Option("--out", help="The file, NAME.onnx.")] = "model.onnx",
) -> None:
    """Write a model and its LAX adapter as one ONNX file that draws heatmaps without PyTorch.

    Its input is images in 0..1; its outputs are logits, heatmap and order. The file is checked
    against PyTorch in onnxruntime. It needs the extra onnx.

    **Examples**

    sufficit export birds-lax --model saved/birds --out birds.onnx
    """
    from sufficit.explainers.lax import Lax
    from sufficit.runs.job import load_model

    lax = Lax.from_pretrained(adapter)
    classifier = load_model(config)
    path = lax.export(classifier, place(to))
    say(f"Written and checked in onnxruntime: {path}", soft_wrap=True)
    say(f"Next, in Python: onnxruntime.InferenceSession({str(path)!r})", soft_wrap=True)
