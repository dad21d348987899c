"""Tensors and plain facts in one safe file, which appears whole or not at all."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sufficit.errors import UserError
from sufficit.files import writing
from sufficit.results import plain


@dataclass(frozen=True)
class Kept:
    """Where a stage's numbers lie."""

    path: Path

    def exists(self) -> bool:
        """Whether the stage is done."""
        return self.path.exists()

    def write(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep them."""
        from safetensors.torch import save

        whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        with writing(self.path) as path:
            path.write_bytes(save(whole, metadata={"facts": json.dumps(plain(facts))}))

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and the facts."""
        from safetensors import safe_open

        try:
            with safe_open(self.path, framework="pt") as opened:
                facts = json.loads(opened.metadata()["facts"])
                return {name: opened.get_tensor(name) for name in list(opened.keys())}, facts
        except Exception as error:
            raise UserError(
                f"{self.path} can't be read ({error}): delete it, and the run makes it anew"
            ) from error
