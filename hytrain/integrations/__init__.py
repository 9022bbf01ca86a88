"""HyTrain under other people's training loops: Accelerate's and the Hugging Face Trainer's.

Nothing in HyTrain imports these modules; a user's script does, and brings their libraries (`pip install '.[hf]'`).
"""

from __future__ import annotations
