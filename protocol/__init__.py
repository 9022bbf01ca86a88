"""The language HyTrain's processes speak: messages, their encoding, tensor handles, handshake, channels.

Owns everything that crosses a process boundary, and nothing else: no torch, no decisions.
"""
