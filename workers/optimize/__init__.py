"""The optimizer process: updates on the CPU, in host memory."""
