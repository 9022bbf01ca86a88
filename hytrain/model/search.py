"""Finds the model of an optimizer that was given parameters.

    a module is entered ─▶ has it all parameters that need gradients?  ─ yes ─▶ it is the model
                                                                       ─ some ─▶ it is a part, of which the first
                                                                                 step knows all

What is entered without gradients does not train, so it may be entered as it is. Code that is compiled meanwhile is the
same as without a search, unless it enters modules that nobody has entered before it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hytrain.uncompiled import constant_when_traced, traced_by_others, uncompiled

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
        self._last: Callable[[], nn.Module | None] = lambda: None
        if not any(known is not None and known.pattern == _CALLED_TWICE for _, known, *_ in warnings.filters):
            warnings.filterwarnings("ignore", _CALLED_TWICE)  # only once: Python forgets then what it has warned of
        self.end = register_module_forward_pre_hook(_Enters(self)).remove

    def enter(self, module: nn.Module, args: Any) -> None:
        wanted, found = self._wanted(), self._found()
        if wanted is None or found is None or module in self._inside:
            return
        self._last = weakref.ref(module)
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

    def knows(self, number: int) -> bool:
        """Whether the module with this id is inside the last one that was entered."""
        last = self._last()
        return last is not None and any(id(inner) == number for inner in last.modules())

    def parts(self) -> list[nn.Module]:
        """The modules that were entered and have some of the parameters, none of them inside another one."""
        inner = {id(module) for part in self._parts for module in part.modules() if module is not part}
        return [part for part in self._parts if id(part) not in inner]


class _Enters:
    """The hook of a search, to which it refers weakly."""

    def __init__(self, search: Search) -> None:
        self._search = weakref.ref(search)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not (torch.compiler.is_dynamo_compiling() and self._knows(id(module))):
            self._enter(module, args)

    @constant_when_traced
    def _knows(self, number: int) -> bool:
        return (search := self._search()) is None or search.knows(number)

    @uncompiled
    def _enter(self, module: nn.Module, args: Any) -> None:
        if (search := self._search()) is not None:
            search.enter(module, args)


# Compiled code that enters a module has this traced. The compiler makes no code of it alone.
traced_by_others(_Enters.__call__)
