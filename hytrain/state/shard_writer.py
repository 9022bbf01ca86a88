"""Writes a rank's shards as safetensors files, which `HuggingFaceStorageReader` reads, from where the arrays lie.

    plan of torch.distributed.checkpoint ─▶ header ─▶ file ◀─ pieces of the arrays, in the order of the plan

torch's `HuggingFaceStorageWriter` makes the same files from two copies of all their arrays in memory, and waits for the
disk after each. Here nothing is copied but what is on the GPU, in pieces (`tensor_file`); several files are written at
once; and nobody waits for the disk. `folders` does that later, for all files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hytrain.state import tensor_file

#: How the reader knows which part of an array a shard is.
OFFSETS: Final = "DCP_SHARDING_INFO"
VERSION: Final = ("DCP_VERSION", "1.0")
#: Of which save a file is.
SAVE: Final = "HYTRAIN_SAVE"


class ShardWriter(StorageWriter):
    """Writes arrays of one rank into `folder`: of which array `file_of` knows the file's number, `dtypes` its dtype.

    Each file has the name of the `save`.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        file_of: Mapping[str, int],
        dtypes: Mapping[str, torch.dtype],
        *,
        save: str,
        in_parallel: bool,
    ) -> None:
        self._folder, self._rank, self._file_of, self._dtypes = folder, rank, file_of, dtypes
        self._save, self._in_parallel = save, in_parallel

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            files.setdefault(self._file_of[item.index.fqn], []).append(item)
        last = max(self._file_of.values(), default=1)
        tensor_file.write_all(
            [
                partial(self._write, f"shard-{self._rank + 1:05d}-model-{number:05d}-of-{last:05d}", items, planner)
                for number, items in files.items()
            ],
            in_parallel=self._in_parallel,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def _write(self, file: str, items: list[WriteItem], planner: SavePlanner) -> None:
        described, offsets = {}, {}
        for item in items:
            assert item.tensor_data is not None, "all that is saved are tensors"
            name, chunk = item.index.fqn, item.tensor_data.chunk
            described[name] = self._dtypes[name], chunk.sizes
            offsets[name] = {"saved_offsets": list(chunk.offsets)}
        metadata = {OFFSETS: json.dumps(offsets), VERSION[0]: VERSION[1], SAVE: self._save}
        arrays = (cast(Tensor, planner.resolve_data(item)) for item in items)
        tensor_file.write(self._folder / f"{file}.safetensors", described, arrays, metadata)

    # What torch's interface has besides.

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
