"""Recipes: a YAML file that says which Hugging Face model to train on which text, and what obeys it.

Importing this package costs nothing: the launcher reads `config` alone, without torch; only the trainer
goes on to `loop`.

    recipe.yaml ─▶ config ─▶ text ─▶ tokenizer ─▶ batches ─┐
                        └──▶ model ─────────────────────────┼─▶ loop ─▶ checkpoint, report
                        └──▶ estimate (--dry-run)           │
                                       schedule, AdamW ─────┘
"""

from __future__ import annotations
