"""Finds the model of an optimizer that was given parameters.

    a module is entered ─▶ has it all parameters that need gradients?  ─ yes ─▶ it is the model
                                                                       ─ some ─▶ it is a part, of which the first
                                                                                 step knows all

What is entered without gradients does not train, so it may be entered as it is.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hytrain.uncompiled import Weakly

#: torch's compiler says so of each hook like this one.
_CALLED_TWICE: Final = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


class Search:
    """The modules that are entered, until `end`.

    `wanted` returns the ids of the parameters that need gradients. `found` is called with the module that has them all,
    and returns whether that is the model. Both are methods of the optimizer, to which this refers weakly.
    """

    def __init__(self, wanted: Callable[[], set[int]], found: Callable[[nn.Module], bool]) -> None:
        self._wanted, self._found = weakref.WeakMethod(wanted), weakref.WeakMethod(found)
        self._parts: list[nn.Module] = []
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        warnings.filterwarnings("ignore", _CALLED_TWICE)
        self.end = register_module_forward_pre_hook(Weakly(self.enter)).remove

    def enter(self, module: nn.Module, args: Any) -> None:
        wanted, found = self._wanted(), self._found()
        if wanted is None or found is None or not torch.is_grad_enabled() or module in self._inside:
            return
        lacking = wanted()
        there = lacking.intersection(map(id, module.parameters()))
        if not there:
            return
        before = set(module._forward_pre_hooks)
        may_start = torch._C._current_graph_task_id() == -1 and not torch._C._is_tracing()
        if len(there) == len(lacking) and may_start and found(module):
            # torch has looked up before which hooks it calls now.
            for number in [number for number in module._forward_pre_hooks if number not in before]:
                module._forward_pre_hooks[number](module, args)
            return
        self._parts.append(module)
        self._inside.update(module.modules())

    def parts(self) -> list[nn.Module]:
        """The modules that were entered and have some of the parameters, none of them inside another one."""
        inner = {id(module) for part in self._parts for module in part.modules() if module is not part}
        return [part for part in self._parts if id(part) not in inner]
