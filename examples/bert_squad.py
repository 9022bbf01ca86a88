"""The Hugging Face Trainer with HyTrain: BERT answers questions by marking the answer in a paragraph.

    python examples/bert_squad.py                             # half a minute on two cores
    python examples/bert_squad.py --small                     # seconds
    python examples/bert_squad.py --squad train-v1.1.json     # any file in the format of SQuAD 1.1

Nothing is downloaded: the model starts from random weights, and its WordPiece vocabulary is built from the file. The
model memorizes the file that comes with the example, which has 24 questions. To answer new questions, start from a
pretrained BERT.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertForQuestionAnswering, BertTokenizerFast, Trainer, TrainingArguments

from hytrain.integrations.transformers import adopt

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a smaller model")
parser.add_argument("--squad", type=Path, default=Path(__file__).parent / "data/squad_tiny.json")
chosen = parser.parse_args()
width, depth, steps = (64, 2, 200) if chosen.small else (128, 4, 300)

articles = json.loads(chosen.squad.read_text())["data"]
paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
questions = [(qa, paragraph["context"]) for paragraph in paragraphs for qa in paragraph["qas"]]

pieces = BertWordPieceTokenizer()
pieces.train_from_iterator(
    [text for qa, context in questions for text in (qa["question"], context)], vocab_size=8000, show_progress=False
)
tokenizer = BertTokenizerFast(vocab=pieces.get_vocab(), model_max_length=384)


def encode(question: str, context: str) -> Any:
    return tokenizer(question, context, truncation="only_second", return_offsets_mapping=True)


def example(qa: dict[str, Any], context: str) -> dict[str, list[int] | int]:
    """Model inputs, with the answer's first and last token; 0, the first token, if the answer was truncated."""
    encoded = encode(qa["question"], context)
    answer = qa["answers"][0]
    first = encoded.char_to_token(answer["answer_start"], sequence_index=1)
    last = encoded.char_to_token(answer["answer_start"] + len(answer["text"]) - 1, sequence_index=1)
    inputs = {name: encoded[name] for name in tokenizer.model_input_names}
    return inputs | {"start_positions": first or 0, "end_positions": last or 0}


def answer(model: BertForQuestionAnswering, question: str, context: str) -> str:
    """The most likely span of the context."""
    encoded = encode(question, context)
    inputs = {name: torch.tensor([encoded[name]], device=model.device) for name in tokenizer.model_input_names}
    with torch.no_grad():
        logits = model(**inputs)
    start = int(logits.start_logits.argmax())
    end = start + int(logits.end_logits[0, start:].argmax())
    offsets = encoded["offset_mapping"]
    return context[offsets[start][0] : offsets[end][1]]


torch.manual_seed(0)
model = BertForQuestionAnswering(
    BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        vocab_size=len(tokenizer),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
args = TrainingArguments(
    "runs/bert_squad",
    max_steps=steps,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    warmup_steps=steps // 10,
    logging_steps=steps // 10,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model, args, train_dataset=[example(*question) for question in questions], processing_class=tokenizer)
opt = adopt(trainer)  # the only new line
trainer.train()

model.eval()
found = [(qa, answer(model, qa["question"], context)) for qa, context in questions[:100]]
for qa, text in found[:4]:
    print(f"{qa['question']} {text}")
exact = sum(text == qa["answers"][0]["text"] for qa, text in found)
print(f"{exact} of {len(found)} answers are exact")
