"""The updates: the same arithmetic in several implementations, from `protocol.rules`.

Importing this package does not import torch. `choice.load` imports the module of the chosen backend.
"""
