"""A language model's loss, a chunk of the sequence at a time, so that the logits of all tokens are never there at once.

    body ─▶ hidden states ─┬─ chunk ─▶ the model's own forward behind its body ─▶ logits ─▶ sum of the losses ─┐
                           └─ chunk ─▶ …, and once more in backward                                            ▼
                                                           of all parts of the sequence, divided by the tokens

With a vocabulary of 128,256, the logits of 8 x 1024 tokens and their copy in float32 take 6.3 GB, and their gradients
as much. The loss is the same sum in another order. Ranks that divide a sequence (`context`) have a part's body and
chunks each. `task` changes the model, `validation` counts the hits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import ModelOutput

from hytrain.errors import ConfigError
from hytrain.recipe.batches import IGNORED
from hytrain.recipe.context import Context


@dataclass
class Predicted(ModelOutput):
    """The mean loss of the next token, and how many tokens were the likeliest ones; both of shape ()."""

    loss: Tensor | None = None
    hits: Tensor | None = None


def in_chunks(model: Any, chunks: int, context: Context | None = None) -> None:
    """From now on, `model(…, labels=labels)` returns what is `Predicted`, and has the logits of one chunk at a time.

    `model` is a Hugging Face model for causal language modelling; one with PEFT's adapters is changed inside. Without
    labels it returns logits, as before. The ranks of a `context` compute a part of each sequence, and all return the
    loss of the whole. Raises ConfigError if its loss cannot be taken apart.
    """
    model = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    takes = inspect.signature(type(model).forward).parameters
    if model.loss_function is not ForCausalLMLoss or "logits_to_keep" not in takes or model.base_model is model:
        raise _refusal(model, context)
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ConfigError(f"{_option(context)} lacks the loss of routers: leave it out, or output_router_logits.")
    if context is not None:
        context.divide(model)
    model.forward = _Chunked(model, chunks, context)


def _option(context: Context | None) -> str:
    """That of a recipe which takes the loss apart."""
    return "train.loss_chunks" if context is None else "parallel.context"


def _refusal(model: Any, context: Context | None) -> ConfigError:
    option = _option(context)
    return ConfigError(
        f"{option}: a {model.config.model_type} does not make the loss of Transformers' causal language "
        f"models from hidden states, or adds to it; leave {option.rpartition('.')[2]} out."
    )


class _Chunked:
    """The forward of a model whose loss is made of chunks."""

    def __init__(self, model: Any, chunks: int, context: Context | None) -> None:
        self._model, self._chunks, self._context, self._whole = model, chunks, context, model.forward
        self.__signature__ = inspect.signature(model.forward)  # by which `generate` knows what it takes

    def __call__(self, *args: Any, labels: Tensor | None = None, **inputs: Any) -> Any:
        context = self._context
        if context is not None:
            context.enter(self._model, None if labels is None else labels.shape[1])
        if labels is None:
            return self._whole(*args, **inputs)
        following = pad(labels, (0, 1), value=IGNORED)[..., 1:]
        learnt = (following != IGNORED).sum()
        if context is not None:
            inputs, following = context.inputs(*args, **inputs), context.part(following, IGNORED)
            args = ()
        body, found = self._model.base_model, list[Any]()
        with body.register_forward_hook(lambda _, __, output: found.append(output)):
            none = torch.zeros(0, dtype=torch.int64, device=labels.device)
            self._whole(*args, logits_to_keep=none, **inputs)
        if len(found) != 1:
            raise _refusal(self._model, context)
        output = found[0]
        length = -(-following.shape[1] // self._chunks)
        parts = zip(output.last_hidden_state.split(length, 1), following.split(length, 1), strict=True)
        sums = [checkpoint(self._part, *part, type(output), use_reentrant=False) for part in parts]
        losses, hits = (torch.stack(each).sum() for each in zip(*sums, strict=True))
        if context is not None:
            losses, hits = context.summed(losses), context.summed(hits)
        return Predicted(loss=losses / learnt, hits=hits)

    def _part(self, hidden: Tensor, following: Tensor, kind: type[Any]) -> tuple[Tensor, Tensor]:
        """The sum of a chunk's losses, and its hits: what the model does behind its body, with these hidden states."""
        model, summed = self._model, list[Tensor]()

        def loss_of(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found = cross_entropy(
                logits.float().flatten(0, -2), following.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            summed.append(found)
            return found

        with _replaced(model.base_model, "forward", lambda *args, **kwargs: kind(last_hidden_state=hidden)):
            with _replaced(model, "_loss_function", loss_of):
                output = self._whole(input_ids=following, labels=following)
        if len(summed) != 1 or output.loss is not summed[0]:
            raise _refusal(model, self._context)
        with torch.no_grad():
            return output.loss, (output.logits.argmax(-1) == following).sum()  # no token is IGNORED


def hits_of(output: Any, labels: Tensor) -> Tensor:
    """How many tokens were predicted as the likeliest ones, shape (); `output` is what a model returned for labels."""
    if isinstance(output, Predicted):
        assert output.hits is not None
        return output.hits
    found: Tensor = (output.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum()  # no token is IGNORED
    return found


@contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """The attribute has this value for a while."""
    missing = object()
    before = thing.__dict__.get(name, missing)
    setattr(thing, name, value)
    try:
        yield
    finally:
        delattr(thing, name) if before is missing else setattr(thing, name, before)
