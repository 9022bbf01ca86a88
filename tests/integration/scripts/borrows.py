"""Attaches the weights that a run lends, and does what each line of its input says. Answers in a line of JSON."""

import hashlib
import json
import os
import signal
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hytrain.weights
from hytrain.errors import HyTrainError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def digests(tensors):
    """Of each tensor's bits."""
    return {
        name: hashlib.sha256(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def logits(weights, config):
    """Of a model that was built without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
    weights.load_into(model.eval())
    with torch.no_grad():
        return {"logits": model(input_ids=torch.arange(16).view(2, 8)).logits}


def forked(weights):
    """What a child of this process is told."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            next(iter(weights.values()))
        except HyTrainError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.wait()
    return os.read(read, 4096).decode()


def child():
    """One that waits until it is killed."""
    if (pid := os.fork()) == 0:
        signal.pause()
    return pid


def left():
    """Of shared memory: what is mapped, and what is open."""
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if "memfd:hytrain" in line]
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # of the folder itself
    return mapped + [name for name in names if "memfd:hytrain" in name]


def answer(weights, order, rest):
    if order == "digests":
        return {"step": weights.step, "tensors": digests(weights), "copies": digests(weights.to(DEVICE))}
    if order == "logits":
        return digests(logits(weights, rest))
    if order == "write":
        next(iter(weights.values())).zero_()
    if order == "forked":
        return forked(weights)
    if order == "child":
        return child()
    if order == "left":
        return left()
    return getattr(weights, order)()  # renew, release, close


def main():
    torch.set_num_threads(1)
    weights = None
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order, _, rest = line.strip().partition(" ")
        try:
            if order == "attach":
                weights, said = hytrain.weights.attach(rest or None), None
            else:
                said = answer(weights, order, rest)
        except HyTrainError as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)


main()
