"""Co-training: a process trains some parts of each batch on the CPU, and its gradients join those of the GPU."""
