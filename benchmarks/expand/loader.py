# SPDX-License-Identifier: Apache-2.0
"""vLLM's `load_format="expanded"`: large weights made on the device from small ones.

Importing this module registers the format. Nothing large is read or kept: each tensor of the
checkpoint format is made, handed to vLLM's own `load_weights`, and dropped. A directory without
`expansion.json` is loaded as vLLM loads it by default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from .filler import Filler
from .trio import RECIPE, expanded_tensors

FORMAT = "expanded"


@register_model_loader(FORMAT)
class ExpandedLoader(BaseModelLoader):
    """Fills a model from the recipe beside its configuration."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is fetched."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Make and load every tensor, one at a time."""
        directory = Path(model_config.model)
        if not (directory / RECIPE).exists():
            default = LoadConfig(load_format="auto", download_dir=self.load_config.download_dir)
            DefaultModelLoader(default).load_weights(model, model_config)
            return
        device = next(parameter.device for parameter in model.parameters())
        fill = Filler(device, model_config.dtype)
        # vLLM's loader of a DFlash drafter collects what it is given, so the tensors of a drafter
        # are all there at once; those of a target are not.
        with torch.no_grad():
            load: Any = model.load_weights
            load(expanded_tensors(directory, fill))
