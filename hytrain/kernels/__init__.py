"""The AdamW update: one arithmetic, several places to run it.

Importing this package imports no torch; `choice.load` decides which of the modules below is needed.

    scalars.py          hyperparameters and step -> the scalars of one update
    backend.py          what an update on host memory looks like
    choice.py           which backend to take
    native.py           C++ and OpenMP (adamw.cpp), built by build.py at first use
    torch_backend.py    torch's fused CPU AdamW
    deepspeed_backend.py  DeepSpeedCPUAdam's operator
    gpu.py              the same update for tensors on a GPU, in Triton
    split.py            the fp32 master behind bf16 and fp16 weights, in torch
"""
