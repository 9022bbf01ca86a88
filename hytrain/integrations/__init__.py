"""HyTrain in the training loops of Accelerate and the Hugging Face Trainer.

Only users' scripts import these modules. They need `pip install '.[hf]'`.
"""

from __future__ import annotations
