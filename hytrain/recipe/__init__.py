"""Recipes: training a Hugging Face model on text or conversations as a YAML file describes it.

Importing this package imports nothing. The launcher reads `config` alone, without torch; only the trainer
imports `loop`.

    recipe.yaml ─▶ config ─▶ text ─▶ tokenizer ─▶ batches ─┐
                        ├──▶ tables ─▶ chat ─▶ packing ─▶──┤
                        └──▶ model ─────────────────────────┼─▶ loop ─▶ checkpoint, report
                        └──▶ estimate (--dry-run)           │
                                       schedule, AdamW ─────┘
"""

from __future__ import annotations
