"""How an optimizer comes to its model and its session.

    AdamW(model)               ─▶ the session starts at once
    AdamW(model.parameters())  ─▶ an optimizer like torch's
                                  ├─ a module with all of them is entered ─▶ the session starts, before its forward
                                  └─ step() with gradients                ─▶ it starts with the parts that were entered

Before that, state that is loaded rests in host memory, and the groups may change. All ranks start together.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from hytrain.algorithms import Algorithm
from hytrain.checks import Groups, check_masters, check_model, check_same, groups_for_torch
from hytrain.errors import UnsupportedError, UsageError
from hytrain.model import fsdp
from hytrain.model.consumed import ConsumedGradient
from hytrain.model.parts import Loose, joined, roots
from hytrain.model.search import Search
from hytrain.model.trained import plane_dtypes
from hytrain.options import Options
from hytrain.run.ranks import Ranks
from hytrain.session import Session
from hytrain.state.dicts import Resting
from hytrain.state.saver import Saver
from hytrain.state.saving import SavedOptimizer
from hytrain.step.accumulation import Accumulation
from hytrain.step.timing import Timing
from hytrain.tensors import is_distributed, untraced
from hytrain.trackers import check_trackers
from hytrain.uncompiled import undecorated

_add_param_group: Final = undecorated(torch.optim.Optimizer.add_param_group)

_NOT_YET: Final = (
    "HyTrain finds the model of model.parameters() when it is called with gradients for the first time: call it before "
    "this, or give the model itself: hytrain.AdamW(model, …)"
)
_TAKEN: Final = (
    "another optimizer of HyTrain has updated parameters of this one in backward, where torch would let this one do it "
    'in step(): pass updates="step" to both, and go on from a checkpoint'
)


class StartedOptimizer(SavedOptimizer):
    """A torch optimizer that has a session from its start, or from when its parameters' model is found."""

    algorithm: ClassVar[Algorithm]

    def _prepare(self, given: dict[str, Any]) -> None:
        """Set what there is before a session. `given` are the options."""
        self._given = given
        self.algorithm.check_as_torch(given)
        self._options = Options.of(self.algorithm, given)
        self._options.cluster_config()
        self._started: Session | None = None
        self._saver, self._loaded, self._folder, self._logs = Saver(), None, None, []
        self._accumulation = Accumulation(self._options.grad_accumulation, Timing(self._options.updates))
        self._resting = Resting(self.algorithm, self._options.precision)

    def _check_model(self, ranks: Ranks, model: nn.Module) -> None:
        if ranks.rank == 0:
            check_trackers(self._options.log_to, "log_to")
        check_model(model)
        check_masters(model, self._options)
        fsdp.reshard(model)

    def _search(self) -> None:
        """Wait for the model to be entered. Raises `UsageError` for a pipeline's stage."""
        if self._options.pipeline_group is not None:
            raise UsageError(
                "with pipeline_group, pass the stage's module, or several, not parameters: a stage that looks for its "
                "model in its first forward waits for the others, which wait for what that forward computes"
            )
        self._groups = Groups(self, self.algorithm)
        self._note_groups()
        self._searched = Search(self._wanted, self._found)
        self._close = weakref.finalize(self, self._searched.end)
        _made.add(self)

    def _start(self, ranks: Ranks) -> None:
        """Start the session over the model. All ranks call it."""
        assert self._model is not None, "it was checked"
        with ranks.together():
            self._groups = Groups(self, self.algorithm)
            self._note_groups()
            _replace(self, self._model)
        check_same(ranks, self._options)
        self._accumulation.timing = Timing(self._options.updates_on(ranks.world))
        self._started = Session(
            self._model,
            self._options,
            ranks=ranks,
            groups=self._groups,
            accumulation=self._accumulation,
            resting=self._resting,
        )
        self._close = weakref.finalize(self, self._started.close)
        _made.add(self)

    # ---------------------------------------------------------------- the model of parameters

    def _wanted(self) -> set[int]:
        return {id(parameter) for parameter in _parameters(self.param_groups) if parameter.requires_grad}

    @property
    def _is_searching(self) -> bool:
        return self._started is None and self._close.alive

    def _found(self, module: nn.Module) -> bool:
        """Start with this model, unless several optimizers have its parameters: then the first to step trains them.

        Lazy modules get their shapes in their first forward, so it starts after that.
        """
        if any(map(is_lazy, module.parameters())):
            return False
        wanted = self._wanted()
        others = [other for other in _made if other is not self and other._is_searching]
        if not all(wanted.isdisjoint(other._wanted()) for other in others):
            return False
        self._start_with([module])
        return True

    def _start_with(self, parts: list[nn.Module]) -> None:
        search, rested = self._close, len([*self._resting])
        try:
            with untraced(), torch._C._DisableAutocast(), torch.enable_grad():
                ranks = Ranks.of_job()
                with ranks.together():
                    given = [*_parameters(self.param_groups)]
                    self._model = joined(parts, given)
                    self._check_model(ranks, self._model)
                    for group in self.param_groups:
                        self.algorithm.check(group)
                self._start(ranks)
                self._give_what_was_loaded()
        except BaseException:
            if self._started is not None:
                self._close()
            self._started, self._model, self._close = None, None, search
            if len([*self._resting]) != rested:
                search()  # what was loaded is given in part, so nothing may go on without the rest
            raise
        search()
        logs, self._logs = self._logs, []
        for step, numbers in logs:
            self._session.log(step, numbers)

    def _starts_in_step(self) -> bool:
        """Whether there is a session now. Without one, and without gradients, `step()` does nothing, as in torch."""
        if self._started is None:
            has_gradients = any(parameter.grad is not None for parameter in _parameters(self.param_groups))
            if self._close.alive and not any(Ranks.of_job().gather(has_gradients)):
                return False
            self._require_open()
            if any(isinstance(parameter.grad, ConsumedGradient) for parameter in _parameters(self.param_groups)):
                raise UsageError(_TAKEN)
            self._start_with(self._searched.parts())
        return True

    def _require_open(self) -> None:
        if not self._close.alive:
            raise UsageError(f"this hytrain.{self.algorithm.name} is closed")

    @property
    def _session(self) -> Session:  # type: ignore[override]
        """Raises `UsageError` if the model was not entered yet."""
        if self._started is None:
            self._require_open()
            if not (parts := self._searched.parts()):
                raise UsageError(_NOT_YET)
            self._start_with(parts)
        assert self._started is not None
        return self._started

    def close(self) -> None:
        """End this optimizer, and the processes that it started. Runs by itself at exit.

        Raises:
            NonFiniteGradients: The last step's gradients were not finite, with `on_nonfinite="raise"`. Everything is
                closed.
        """
        self._saver.close()
        self._close()

    # ---------------------------------------------------------------- groups

    def _groups_from(self, param_groups: ParamsT | None) -> list[dict[str, Any]]:
        """The groups that torch's constructor gets, with those of their defaults that not all of them have."""
        return groups_for_torch(None if self._has_searched else self._model, param_groups)

    def _add_group(self, param_group: dict[str, Any]) -> None:
        if not hasattr(self, "_groups"):  # torch's constructor
            _add_param_group(self, param_group)
            return
        groups = len(self.param_groups)
        if self._is_searching:
            for group in self._groups_from([param_group]):
                _add_param_group(self, group)
                self.algorithm.check(self.param_groups[-1])
            self._note_groups()
            return
        before = self._engine
        try:
            with self._session.ranks.together():
                before.before_regroup("add_param_group")
                named = self._groups_from([param_group])
                self._session.require_free([p for group in named for p in group["params"]])
                for group in named:
                    _add_param_group(self, group)
                    self.algorithm.check(self.param_groups[-1])
                model = self._with_others()
                check_model(model)
            self._note_groups()
            self._session.rebuild(model)
            self._model = model
        except BaseException:
            if self._engine is before:
                del self.param_groups[groups:]
                self._note_groups()
            raise

    @property
    def _has_searched(self) -> bool:
        """Whether it was given parameters, and found their model by itself."""
        return hasattr(self, "_searched")

    def _with_others(self) -> nn.Module:
        """The model, and parameters in the groups that it does not have. Raises `UnsupportedError` for FSDP2's."""
        assert self._model is not None, "it was found"
        fsdp.reshard(self._model)
        given, ours = [*_parameters(self.param_groups)], {id(parameter) for parameter in self._model.parameters()}
        others = [parameter for parameter in given if id(parameter) not in ours]
        if not others:
            return self._model
        if any(map(is_distributed, others)):
            raise UnsupportedError(
                "add_param_group has shards of a module that is no part of the model which HyTrain has found: give it "
                "the whole model, hytrain.AdamW(model, param_groups=…)"
            )
        return joined([root for root in roots(self._model) if not isinstance(root, Loose)], given)

    def _note_groups(self) -> None:
        """Remember what the groups are, to notice when the loop changes more than it may."""
        self._kept = [*_parameters(self.param_groups)]  # by nothing else
        self._groups.note()
        self._no_state.parameters = self._kept
        self._no_state.planes = {
            id(parameter): plane_dtypes(parameter, rule, self._options.precision)
            for group, rule in zip(self.param_groups, self._groups.rules, strict=True)
            for parameter in group["params"]
        }

    # ---------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Called by `copy` and `pickle`: of an optimizer without a session, they make another one."""
        if not self._is_searching:
            raise UsageError("an optimizer of HyTrain cannot be copied or pickled: use its state_dict(), or opt.save")
        loaded = self.state_dict() if self._loaded else None
        kept = {"given": self._given, "loaded": loaded, "folder": self._folder}
        return {"defaults": self.defaults, "param_groups": self.param_groups, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given, loaded, folder = state.pop("given"), state.pop("loaded"), state.pop("folder")
        super().__setstate__(state)
        self._model, self.state = None, {}
        self._prepare(given)
        self._search()
        if loaded is not None:
            self.load_state_dict(loaded)
        self._folder = folder


def _parameters(param_groups: list[dict[str, Any]]) -> Iterable[Tensor]:
    return (parameter for group in param_groups for parameter in group["params"])


#: All that were made and still exist, also those that are closed.
_made: weakref.WeakSet[StartedOptimizer] = weakref.WeakSet()


def _replace(new: StartedOptimizer, model: nn.Module) -> None:
    """Close the optimizers of parameters that a new one is made for: the newest one trains them.

    A notebook's cell that makes `opt` anew cannot close the old one, which has the name until then. Whoever still uses
    the old one gets an error.
    """
    if any(other._close.alive for other in _made):
        gc.collect()  # an unreachable optimizer may be in a reference cycle: a scheduler creates one
    given = {id(parameter): parameter.requires_grad for parameter in _parameters(new.param_groups)}
    trained = {identity for identity, needs_gradient in given.items() if needs_gradient}
    for other in list(_made):
        if (session := other._started) is None:
            continue
        same = other._model is model and any(identity in given for ids in other._groups.ids for identity in ids)
        if same or session.trains(trained):
            session.last_words = (
                "this optimizer is closed, because a newer one was made for parameters that it trained: use the newer "
                "one, or give all parameters to one optimizer, in as many param_groups as you like"
            )
            other.close()
