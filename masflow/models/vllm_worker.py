"""What vLLM's own worker processes do for masflow: take published weights. vLLM mixes this into its worker.

Knows no policies; imports no vLLM, which is there where it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

from masflow.models.publishing import as_tensor

__all__ = ["TakesWeights"]


class TakesWeights:
    """Methods that vLLM's `collective_rpc` finds on every worker."""

    def take_weights(self, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str], folder: str) -> None:
        """Load weights in place, by the names of the Hugging Face model.

        Args:
            arrays: those that were published.
            folder: of the base, for the others: vLLM lays a layer's weights out when all of them are there.
        """
        worker: Any = self
        worker.reload_weights(weights_iterator=_whole(arrays, dtypes, Path(folder)))
        for module in worker.get_model().modules():
            # vLLM lays a head out anew only when its own weights come; a tied head's are the embeddings'.
            if type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)


def _whole(
    arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str], folder: Path
) -> Iterator[tuple[str, Tensor]]:
    for name, array in arrays.items():
        yield name, as_tensor(array, dtypes[name])
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as saved:
            yield from ((name, saved.get_tensor(name)) for name in saved.keys() if name not in arrays)  # noqa: SIM118
