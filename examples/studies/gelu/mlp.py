"""GPT-2-like models whose MLPs add the bias and take the GELU in one kernel.

Call `fuse` on a model of Transformers before the optimizer sees it. The parameters keep their names.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from examples.studies.gelu.bias_gelu import bias_gelu
from hytrain.errors import ConfigError

#: The modules of the tanh form, by Transformers' names of it.
TANH_GELUS: Final = tuple(type(ACT2FN[name]) for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"))


class Conv1DGelu(nn.Module):
    """A projection and the GELU after it, with the parameters of a Conv1D, under the same names.

    weight: [inputs, outputs]; bias: [outputs].
    """

    def __init__(self, projection: Conv1D) -> None:
        super().__init__()
        self.weight, self.bias = projection.weight, projection.bias

    def forward(self, x: Tensor) -> Tensor:
        return bias_gelu(x @ self.weight, self.bias)


def fuse(model: Any) -> None:
    """Puts a Conv1DGelu into the place of each MLP's `c_fc`, and nothing into that of its `act`.

    Raises ConfigError if the model has no MLP with a Conv1D of that name and the tanh form of GELU.
    """
    mlps = [each for each in model.modules() if _is_gpt2_like(each)]
    if not mlps:
        kind = model.config.get_text_config().model_type
        raise ConfigError(
            f"fuse() is for MLPs like GPT-2's, with the tanh form of GELU after a Conv1D, and this {kind} "
            "has none: leave it out."
        )
    for mlp in mlps:
        mlp.c_fc, mlp.act = Conv1DGelu(mlp.c_fc), nn.Identity()


def _is_gpt2_like(module: nn.Module) -> bool:
    return isinstance(getattr(module, "c_fc", None), Conv1D) and isinstance(getattr(module, "act", None), TANH_GELUS)
