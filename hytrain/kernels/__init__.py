"""The updates: the same arithmetic in several implementations, from `protocol.rules`.

Importing this package does not import torch. `choice.load` imports the module of the chosen backend.

    scalars.py          hyperparameters and step -> the scalars of one update
    backend.py          the interface of updates on host memory
    choice.py           which backend to use
    native.py           C++ and OpenMP (update.cpp), built by build.py at first use
    torch_backend.py    torch's operators
    deepspeed_backend.py  DeepSpeedCPUAdam's operator, for AdamW and Adam
    gpu.py              the same updates for tensors on a GPU, in Triton
    split.py            the fp32 master behind bf16 and fp16 weights, in torch
    rounding.py         moments in bf16, rounded stochastically, in torch
    float8.py           moments as 8-bit floats, in torch
"""
