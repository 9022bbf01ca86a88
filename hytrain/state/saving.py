"""A torch optimizer that saves and loads its state: the methods that torch has for it, and those for folders.

`dicts` has the state in torch's form, `folders` the files, `saver` the thread of `async_save`.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hytrain.errors import UsageError
from hytrain.memory.capacity import GpuMemory
from hytrain.model.consumed import NO_STATE, NoState
from hytrain.run.ranks import Ranks
from hytrain.state import dicts, folders
from hytrain.state.dicts import OptimizerState, Resting
from hytrain.state.saver import Saver
from hytrain.step.engine import Engine

if TYPE_CHECKING:
    from hytrain.session import Session


class SavedOptimizer(torch.optim.Optimizer):
    """The state of an optimizer: what torch, Accelerate and users read, save and load of it.

    Before its session starts, state that is loaded rests, with the number of its steps and its loss scale in `_loaded`;
    or it is in `_folder`, in the save of that name, and the groups have its hyperparameters. `_logs` is what the loop
    has logged by then.
    """

    _model: nn.Module | None
    _started: Session | None
    _session: Session
    _resting: Resting

    _saver: Saver
    _loaded: tuple[int, dict[str, Any] | None] | None
    _folder: tuple[Path, str] | None
    _logs: list[tuple[int, dict[str, float]]]

    @property
    def _engine(self) -> Engine:
        return self._session.engine

    def _state(self, asked: str) -> OptimizerState:
        """All state, with every update. Raises `UsageError` between backward and `step()`."""
        if self._started is None:
            return OptimizerState(self.param_groups, [], self._resting)
        engine, session = self._engine, self._session
        engine.before_load(asked)
        engine.expose_state()
        return OptimizerState(self.param_groups, session.parameters, session.resting, engine.verdicts.loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of torch's optimizer of the same name, after waiting for all updates.

        A parameter that was never updated has no entry, as in torch; before the first step, all have entries of zeros
        for whoever has asked whether there is state, as torch's distributed checkpoints do to create it.
        Each entry counts the parameter's updates in `step`, also where torch does not. Moments are views of the planes,
        not copies; float8 ones are copies, in bfloat16 and in host memory. If the GPU owns some layers and the host
        others, those of the GPU are copied to the host. bfloat16 parameters have a `remainder` (int16) next to the
        moments: weights and remainder together are the master. The `remainder` of float16 parameters is the master
        itself (float32). Remainders are copies. The loss scale's state is in the first group, and the step's number
        beside the groups, under keys that torch ignores.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._started is None and self._folder is None:
            state = self._state_before_start()
        else:
            self._engine.import_written()
            state = dicts.state_dict(self._state("opt.state_dict()"))
            state["steps"] = self._engine.steps
        if not self._no_state.was_asked:  # Accelerate moves all of it to the GPU
            state["state"] = {index: entry for index, entry in state["state"].items() if entry["step"]}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or from torch; parameters may have names for numbers.

        Raises:
            ConfigError: The state does not fit.
            UsageError: Called between backward and `step()`.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        into = self._state("opt.load_state_dict()")
        with ExitStack() as whole:
            when_checked = partial(self._import_for_loading, whole)
            dicts.load_state_dict(state_dict, into, self._named(state_dict["param_groups"]), when_checked)
            counts = map(dicts.count_of, state_dict["state"].values())
            steps = state_dict.get("steps", max(counts, default=0))
            if self._started is None:
                self._folder = None
                self._loaded = steps, state_dict["param_groups"][0].get("loss_scale")
            else:
                self._session.restored(steps)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _import_for_loading(self, whole: ExitStack) -> None:
        """Called before state is overwritten, which ends training if it fails half-way: `whole` lasts as long.

        Keeps remainders: what is loaded may be a view of the current state.
        """
        if self._started is not None:
            self._engine.import_weights(keep_remainder=True)
            self._engine.expose_state()
            whole.enter_context(self._engine.masters.loading())

    def _named(self, labels: list[dict[str, Any]]) -> list[tuple[str, nn.Parameter]]:
        """All names of the model's parameters. Before it is found, what a state calls them in torch's order."""
        if self._model is not None:
            return list(self._model.named_parameters(remove_duplicate=False))
        groups = zip(labels, self.param_groups, strict=False)
        pairs = [zip(theirs["params"], ours["params"], strict=False) for theirs, ours in groups]
        return [(str(label), parameter) for group in pairs for label, parameter in group]

    def _state_before_start(self) -> dict[str, Any]:
        """What `state_dict` returns: what was loaded, or the state before the first step."""
        steps, loss_scale = self._loaded or (0, None)
        resting = self._resting
        if self._loaded is None:
            resting = Resting(resting.algorithm, resting.precision)
            resting.begin(self.param_groups)
        state = dicts.state_dict(OptimizerState(self.param_groups, [], resting))
        if loss_scale is not None:
            state["param_groups"][0]["loss_scale"] = loss_scale
        return {**state, "steps": steps}

    def _give_what_was_loaded(self) -> None:
        """The session has started: it continues with the state."""
        if self._loaded is not None:
            self._session.begin_with(*self._loaded)
        if self._folder is not None:
            folder, begun = self._folder
            self._load(folder, begun)

    @property  # type: ignore[override]
    def state(self) -> NoState:
        """An entry for each trained parameter; see `state_dict`. Reading or writing a value raises `UsageError`."""
        return self._no_state

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "_no_state"):
            raise UsageError(NO_STATE)
        self._no_state = NoState()  # torch's constructor

    def save(self, folder: str | Path) -> None:
        """Write the whole optimizer state into `folder` as safetensors: step counts, moments, remainders.

        All ranks call it, with a folder that all of them see. Each one writes its own shards.

        A state that `folder` has is replaced in one rename: if the process is killed, the folder has the old state or
        the new one. `sha256sum -c SHA256SUMS` in the folder checks it, and so does `load`. The folder's other files
        stay. Several processes may save into one folder: the last one to finish has saved its state.

        Raises `SavingError` if it cannot be written: the disk is full, for example. Then the old state is there, and
        training can go on.
        """
        self._write(folder, "opt.save()").finish(Ranks.of_job(), in_parallel=True)

    def async_save(self, folder: str | Path) -> Future[None]:
        """Like `save`, but return as soon as there is a copy of this step's state, and train on meanwhile.

        The copy is in GPU memory that no step so far has needed. Without so much of it on every rank, it is the files,
        which the system has in memory. A thread of this process writes the files, waits for the disk, computes the
        checksums, and makes the state the folder's current one. Then the future is done, or has the `SavingError`,
        which is also logged. The next save waits for it, and so does `close`.

        The name and the meaning are those of `torch.distributed.checkpoint.async_save`. Model weights are not part of
        it: save them before the next step.
        """
        saved = self._write(folder, "opt.async_save()", self._session.memory)
        return self._saver.start(saved.finish, f"the optimizer's state in {folder}")

    def _write(self, folder: str | Path, asked: str, memory: GpuMemory | None = None) -> folders.Save:
        """Write the state into files."""
        self._saver.wait()
        self._engine.import_written()
        return folders.save(Path(folder).absolute(), self._state(asked), steps=self._engine.steps, memory=memory)

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, on any number of ranks. Load the model's weights yourself, before or after.

        What others save there meanwhile is not read.

        Raises:
            ConfigError: The folder is incomplete, damaged, or another model's. Nothing has changed.
            UsageError: Called between backward and `step()`.
        """
        self._saver.wait()
        folder = Path(folder).absolute()
        if self._model is None:
            self._folder = folder, folders.load_groups(folder, self._state("opt.load()"))
            self._loaded = None
            self._resting.clear()
            return
        self._load(folder)

    def _load(self, folder: Path, begun: str | None = None) -> None:
        assert self._model is not None, "it was found"
        named, into = dict(self._model.named_parameters()), self._state("opt.load()")
        with ExitStack() as whole:
            self._session.restored(folders.load(folder, into, named, partial(self._import_for_loading, whole), begun))
