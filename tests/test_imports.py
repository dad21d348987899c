"""What importing Sufficit's names imports: heavy libraries wait until they are used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sufficit

HEAVY = {
    *("lightning", "pytorch_lightning", "matplotlib", "mlxtend", "pandas", "pyarrow", "ray"),
    *("scipy", "sklearn", "timm", "torchmetrics", "transformers", "fastapi", "uvicorn", "jinja2"),
    *("captum", "zennit"),
}
LATER = {*HEAVY, "sympy", "torchvision", "torch._dynamo", "torch._inductor", "triton"}
ALL = "import sufficit\nfor name in dir(sufficit): getattr(sufficit, name)"
RUNS = "import sufficit.runs.workers; Classifier.load('sufficit:digits')"
CODES = {
    f"from sufficit import Classifier, evaluate, explain, leak, Lax\n{RUNS}": LATER,
    ALL: HEAVY,
}


@pytest.mark.processes
@pytest.mark.parametrize("code", CODES)
def test_imports_leave_heavy_libraries_alone(code: str) -> None:
    told = f"{code}\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"torch", "sufficit.metrics.scores", "sufficit.explainers"} <= modules
    assert not modules & CODES[code]


def test_no_module_hides_a_public_name() -> None:
    """`import sufficit.agreement` would make the function `sufficit.agreement` a module."""
    modules = {path.stem for path in Path(sufficit.__file__).parent.iterdir()}
    assert not modules & set(dir(sufficit))
