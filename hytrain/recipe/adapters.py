"""Low-rank adapters (LoRA) through PEFT: only they are trained, saved and resumed.

`task` and `estimate` call `adapt`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from hytrain.errors import ConfigError
from hytrain.extras import needed
from hytrain.recipe import config


def adapt(model: Any, lora: config.Lora, checkpoint: Path | None) -> Any:
    """The frozen model with adapters in its dtype: new ones from torch's seed, or those of a checkpoint.

    Raises ConfigError if the model has no such modules, or if the checkpoint has no adapters.
    """
    with needed("lora", "lora"):
        from peft import LoraConfig, PeftModel, get_peft_model
        from peft.utils import SAFETENSORS_WEIGHTS_NAME

    if checkpoint is not None and not (checkpoint / SAFETENSORS_WEIGHTS_NAME).is_file():
        raise ConfigError(f"{checkpoint} has no {SAFETENSORS_WEIGHTS_NAME}: HyTrain reads no adapters from a pickle")
    targets = lora.target_modules
    wanted = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        with warnings.catch_warnings():  # PEFT reads a property that Transformers has renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # Adapters in the model's dtype have float32 masters, as all parameters have.
            if checkpoint is None:
                adapted: Any = get_peft_model(model, wanted, autocast_adapter_dtype=False)
            else:
                adapted = PeftModel.from_pretrained(model, checkpoint, is_trainable=True, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"lora does not fit the model: {' '.join(str(error).split())}") from None
    return adapted.train()
