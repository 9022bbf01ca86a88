from __future__ import annotations
import os, time
from typing import Any
import torch
import torch.distributed as dist
from helpers import differing
from test_accelerate_ranks import accelerated, weights, state
from small_models import llama, VOCAB
from sharded_models import local

def data(): 
    g = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCAB, (64, 12), generator=g)
    return [{"input_ids": r, "labels": r} for r in rows]

def make(folder, model, **changed):
    from transformers import Trainer, TrainingArguments
    from accelerate import DistributedType, PartialState
    a = dict(max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2, warmup_steps=2, weight_decay=.1, max_grad_norm=1e3, logging_steps=1,
      save_steps=3, eval_strategy="steps", eval_steps=3, optim="adamw_torch_fused", use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True, report_to="none",
      fsdp="full_shard auto_wrap", fsdp_config={"fsdp_version": 2, **changed.pop("fsdp_config", {})})
    args = TrainingArguments(folder, **{**a, **changed})
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(model, args, train_dataset=data(), eval_dataset=data()[:8])

def hist(t):
    return [{k: e[k] for k in ("step","loss","learning_rate","eval_loss", "grad_norm") if k in e} for e in t.state.log_history]

def run(ours, folder, resume=None, **changed):
    from hytrain.integrations.transformers import adopt
    with accelerated():
        t = make(folder, llama(), **changed)
        if ours: opt = adopt(t, k=float(dist.get_rank()))
        t.train(resume_from_checkpoint=resume)
        raw = opt if ours else t.optimizer.optimizer
        w, s, h = weights(t.model), state(raw), hist(t)
        if ours: opt.close()
    return w, s, h

def both(folder, **o):
    import warnings
    warnings.simplefilter("default")
    a = run(False, folder + "/torch", **o)
    b = run(True, folder + "/ours", **o)
    out = [differing(a[0], b[0]), differing(a[1], b[1]), a[2], b[2], os.listdir(folder + "/ours/checkpoint-3")]
    for name, ours, of in (("oo", True, "ours"), ("ot", True, "torch"), ("to", False, "ours")):
        c = run(ours, folder + "/" + name, folder + f"/{of}/checkpoint-3", **o)
        out += [name, differing(a[0], c[0]), differing(a[1], c[1])]
    return out
