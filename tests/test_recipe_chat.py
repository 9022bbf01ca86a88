"""Conversations as examples: which tokens are learnt, how they share sequences and steps, and what is refused."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hytrain.errors import ConfigError
from hytrain.recipe import chat, config, model, packing, tables, text, tokenizer
from hytrain.recipe.batches import IGNORED, Batch, Batches, Rows, Windows, steps_of
from hytrain.recipe.chat import Example
from hytrain.recipe.tokenizer import TextTokenizer

SNOWMAN = "\N{SNOWMAN}"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Äpfel?"},
    {"role": "assistant", "content": f"Yes {SNOWMAN}"},
    {"role": "user", "content": "\nYes?"},
    {"role": "assistant", "content": "No"},
]
PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
#: As some models' templates do: an answer before the last loses a part.
FORGETFUL = PLAIN.replace("m['content'] }}", "m['content'] if loop.last else '...' }}")
#: The answer ends with its own last character.
BARE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "max_position_embeddings": 64, **SIZES}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 5, "num_key_value_heads": 2}
MIXTRAL = {**MISTRAL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


def words(kind: str = "bytes", template: str | None = chat.CHATML) -> TextTokenizer:
    wanted = config.Tokenizer.model_validate({"kind": kind, "vocab_size": 300})
    said = "\n".join(message["content"] for message in TALK).encode() * 20
    found = tokenizer.build(wanted, None, said)
    found.hf.chat_template = template
    return found


def learnt(of: TextTokenizer, row: dict[str, Any]) -> list[str]:
    """The text of each stretch of tokens that are learnt."""
    numbers, mask = chat.encode(of, row)
    stretches: list[list[int]] = []
    for i, number in enumerate(numbers):
        if mask[i]:
            if not mask[i - 1]:
                stretches.append([])
            stretches[-1].append(number)
    return [of.decode(torch.tensor(stretch)) for stretch in stretches]


# ---------------------------------------------------------------- which tokens


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize(
    ("template", "end"), [(chat.CHATML, "<|im_end|>"), (PLAIN, "</s>"), (BARE, "")], ids=["chatml", "plain", "bare"]
)
def test_the_answers_are_learnt_and_nothing_else(kind: str, template: str, end: str) -> None:
    """Token by token, with and without marks in the template, also if an answer ends inside a character's bytes."""
    of = words(kind, template)
    numbers, mask = chat.encode(of, {"messages": TALK})
    whole = of.hf.apply_chat_template(TALK, tokenize=False)
    assert of.decode(torch.tensor(numbers)) == whole and len(mask) == len(numbers)
    assert learnt(of, {"messages": TALK}) == [f"Yes {SNOWMAN}{end}", f"No{end}"]
    assert learnt(of, {"prompt": TALK[:4], "completion": TALK[4:]}) == [f"No{end}"]


def test_texts_in_parts_are_the_same_as_whole_ones() -> None:
    """Of chatml, which knows no parts. A tokenizer's own template is given them as they are."""
    parts = [message | {"content": [{"type": "text", "text": half} for half in halves(message)]} for message in TALK]
    of = words("bpe", chat.CHATML)
    assert chat.encode(of, {"messages": parts}) == chat.encode(of, {"messages": TALK})
    assert "".join(chat.texts({"messages": parts})) == "".join(chat.texts({"messages": TALK}))


def halves(message: dict[str, Any]) -> tuple[str, str]:
    text = message["content"]
    return text[: len(text) // 2], text[len(text) // 2 :]


def test_of_a_prompt_and_its_completion_the_completion_is_learnt() -> None:
    of = words("bpe", None)
    row = {"prompt": "Äpfel?\n", "completion": "\nYes"}
    numbers, mask = chat.encode(of, row)
    assert of.decode(torch.tensor(numbers)) == "Äpfel?\n\nYes" and learnt(of, row) == ["\nYes"]
    assert numbers[: mask.index(True)] == of.encode("Äpfel?\n".encode()).tolist(), "as where a prompt is continued"
    of.hf.add_special_tokens({"eos_token": "<end>"})
    assert learnt(of, row) == ["\nYes<end>"]
    assert chat.opening(of, "Äpfel?\n", conversation=False) == (of.encode("Äpfel?\n".encode()).tolist(), "<end>")


def test_a_sample_begins_as_an_answer_and_ends_as_one() -> None:
    for template, ending in ((chat.CHATML, "<|im_end|>"), (PLAIN, "</s>"), (BARE, "")):
        of = words("bytes", template)
        numbers, found = chat.opening(of, "Äpfel?", conversation=True)
        asked = [{"role": "user", "content": "Äpfel?"}]
        assert of.decode(torch.tensor(numbers)) == of.hf.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        assert found == ending


@pytest.mark.parametrize(
    ("row", "template", "part"),
    [
        ({"messages": TALK}, None, "tokenizer.chat_template: chatml"),
        ({"messages": TALK}, FORGETFUL, "renders the beginning of this conversation differently"),
        ({"messages": TALK}, "{{ raise_exception('No system role.') }}", "No system role"),
        ({"messages": "hello"}, PLAIN, "something else where a list of messages belongs"),
        ({"messages": [{"from": "human", "value": "hello"}]}, PLAIN, "of the form"),
        ({"messages": [{"role": "user", "content": 3}]}, PLAIN, "content is not a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, chat.CHATML, "parts other than text"),
        ({"prompt": "a", "completion": TALK}, PLAIN, "the columns prompt, completion, but"),
        ({"conversations": TALK}, PLAIN, "the columns conversations, but data.kind: chat needs messages"),
    ],
)
def test_rows_that_cannot_be_learnt_are_one_sentence(row: dict[str, Any], template: str | None, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        chat.examples(words("bytes", template), [("chat.jsonl, line 3,", row)], 256)
    assert str(caught.value).startswith("chat.jsonl, line 3, ") and "\n" not in str(caught.value)


def test_examples_that_are_cut_or_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    of = words("bytes", None)
    pairs = [("ab", "cdef"), ("ab", "c"), ("abcdef", "g"), ("abc", " \n"), ("", "x")]
    rows = [("", {"prompt": prompt, "completion": completion}) for prompt, completion in pairs]
    found = chat.examples(of, rows, limit=5)
    assert [bytes(example.tokens.tolist()) for example in found] == [b"abcde", b"abc"]
    assert [example.learnt.tolist() for example in found] == [[False] * 2 + [True] * 3, [False, False, True]]
    assert [record.getMessage().partition(" examples ")[0] for record in caplog.records] == [
        "2 of 5",
        "1 of 5",
        "1 of 5",
    ]
    with pytest.raises(ConfigError, match="None of the 2 examples"):
        chat.examples(of, rows[2:4], limit=5)


def test_a_template_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN)
    for wanted, expected in (("chatml", chat.CHATML), (file, PLAIN), (None, PLAIN)):
        of = words("bytes", PLAIN)
        chat.set_template(of, wanted)  # type: ignore[arg-type]
        of.hf.save_pretrained(tmp_path / "saved")
        assert tokenizer.load(tmp_path / "saved").hf.chat_template == expected
    with pytest.raises(ConfigError, match=r"missing\.jinja can't be read"):
        chat.set_template(of, tmp_path / "missing.jinja")


# ---------------------------------------------------------------- files with rows


def test_rows_are_the_same_from_every_kind_of_file(tmp_path: Path) -> None:
    from datasets import Dataset
    from pyarrow import Table
    from pyarrow.parquet import write_table

    rows = [{"messages": TALK[:3], "id": 1}, {"messages": TALK[1:3], "id": 2}, {"messages": TALK[3:], "id": 3}]
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "plain.jsonl").write_text(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "folder").mkdir()
    write_table(Table.from_pylist(rows), tmp_path / "folder" / "d.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("plain.jsonl", "packed.jsonl.gz", "folder", "saved"):
        found = list(tables.rows([tmp_path / name]))
        assert [row for _, row in found] == rows, name
        assert found[1][0].endswith(("line 2,", "row 2,"))
    numbered = [{**row, "text": f"number {row['id']}\n"} for row in rows]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, numbered)))
    texts = text.joined(tables.column([tmp_path / "texts.jsonl"], "text"), [])
    assert texts == b"number 1\n\nnumber 2\n\nnumber 3"


def test_unusable_tables_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset, DatasetDict

    (tmp_path / "torn.jsonl").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "latin.jsonl").write_bytes('{"a": 1}\n{"a": "ä"}'.encode("latin-1"))
    (tmp_path / "deep.jsonl").write_text('{"a":' + "[" * 100_000)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    (tmp_path / "bare").mkdir()
    (tmp_path / "chat.csv").write_text("a,b")
    DatasetDict({"test": Dataset.from_list([{"a": 1}])}).save_to_disk(str(tmp_path / "splits"))
    for name, part in (
        ("torn.jsonl", "line 2, is not valid JSON"),
        ("list.jsonl", "line 1, is not a JSON object"),
        ("latin.jsonl", "line 2, is not UTF-8"),
        ("deep.jsonl", "line 1, is not valid JSON"),
        ("torn.parquet", "can't be read"),
        ("bare", "holds no rows"),
        ("chat.csv", r"does not end in \.jsonl or \.parquet"),
        ("missing.jsonl", "does not exist"),
        ("splits", "holds the splits test; name the folder of one"),
    ):
        with pytest.raises(ConfigError, match=part) as caught:
            list(tables.rows([tmp_path / name]))
        assert "\n" not in str(caught.value)
    (tmp_path / "cut.jsonl").write_text(r'{"a": "cut \ud83d", "b": "whole \ud83d\ude00"}')
    assert [row for _, row in tables.rows([tmp_path / "cut.jsonl"])] == [{"a": "cut ?", "b": "whole 😀"}]
    (tmp_path / "marked.jsonl").write_text('{"a": 1}', encoding="utf-8-sig")
    assert [row for _, row in tables.rows([tmp_path / "marked.jsonl"])] == [{"a": 1}]
    (tmp_path / "a.jsonl").write_text('{"a": 1}')
    for column, part in (("b", "no such column; its columns: a"), ("a", "has int there")):
        with pytest.raises(ConfigError, match=part):
            list(tables.column([tmp_path / "a.jsonl"], column))
    for library, name in (("pyarrow", "torn.parquet"), ("datasets", "splits/test")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ConfigError, match=r"pip install '.*\[data\]'"):
            list(tables.rows([tmp_path / name]))


# ---------------------------------------------------------------- sequences and steps


def some_examples(lengths: list[int], seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        tokens = torch.randint(256, (length,), generator=generator, dtype=torch.int32).numpy()
        mask = (torch.arange(length) >= length // 3).numpy()
        mask[0] = False
        found.append(Example(tokens, mask))
    return found


def new_model(fields: dict[str, Any], attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    hf = model.configuration(config.Model(config=fields), 256, 64)
    hf._attn_implementation = attention
    return AutoModelForCausalLM.from_config(hf).eval()


def gradients(of: nn.Module, batch: Batch, parts: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    of.zero_grad()
    total = 0.0
    for part, divisor in batch.parts(parts):
        loss = of(**part.inputs(CPU)).loss / divisor
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}


LENGTHS = [9, 3, 12, 2, 7, 16, 5, 4]


def test_packing_keeps_every_example_whole_and_wastes_little() -> None:
    assert packing.pack([4, 8, 2, 5, 3], 8) == [[1], [3, 4], [0, 2]]
    rows = packing.pack(LENGTHS, 16)
    assert sorted(i for row in rows for i in row) == list(range(len(LENGTHS)))
    assert all(sum(LENGTHS[i] for i in row) <= 16 for row in rows) and len(rows) == 4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fields", [LLAMA, MISTRAL, MIXTRAL, GPT2], ids=["llama", "mistral", "mixtral", "gpt2"])
def test_packed_examples_have_the_gradients_of_single_ones(fields: dict[str, Any], attention: str) -> None:
    """Each example alone, without padding, is the truth; padded and packed batches are compared with it."""
    of, examples = new_model(fields, attention), some_examples(LENGTHS)
    packing.refuse_leaks(of, CPU)
    answers = sum(int(example.learnt.sum()) for example in examples)
    of.zero_grad()
    expected = 0.0
    for example in examples:
        tokens = torch.from_numpy(example.tokens).long()[None]
        logits = of(input_ids=tokens).logits[0, :-1]
        each = nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        loss = each[torch.from_numpy(example.learnt[1:])].sum() / answers
        loss.backward()
        expected += loss.item()
    truth = {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}
    for is_packed, parts in ((False, 1), (False, 4), (True, 1), (True, 2)):
        rows = Rows(examples, 16, is_packed, pad=0)
        batch = rows.batch(range(len(rows.rows)))
        assert batch.learnt == answers and batch.tokens.numel() - batch.padding == sum(LENGTHS)
        loss, found = gradients(of, batch, parts)
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, gradient in truth.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


class Around(nn.Module):
    """A Llama inside of another model."""

    def __init__(self) -> None:
        super().__init__()
        self.of = new_model(LLAMA)
        self.config = self.of.config


def test_rounding_that_differs_is_not_taken_for_examples_that_mix() -> None:
    class Rounds(Around):
        """Rounds otherwise with other tokens in the batch, and a little in other rows."""

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
            output = self.of(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
            rows = 5e-6 * torch.arange(len(input_ids))[:, None, None]
            output.logits = output.logits * (1 + 1e-3 * (input_ids.sum() % 7) + rows)
            return output

    packing.refuse_leaks(Rounds(), CPU)


def test_models_in_which_packed_examples_would_mix_are_refused() -> None:
    class Forgets(Around):
        """Takes positions, and computes without them."""

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
            return self.of(input_ids=input_ids)

    with pytest.raises(ConfigError, match="mixes the tokens"):
        packing.refuse_leaks(Forgets(), CPU)
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigError, match="takes no position_ids"):
        packing.refuse_leaks(new_model(bloom, "eager"), CPU)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    assert steps_of(2.0, 10, 4) == 5 and steps_of(0.01, 10, 4) == 1 and steps_of(1.0, 9, 4) == 3

    def drawn(seed: int) -> Callable[[int], list[int]]:
        batches = Batches(Windows(torch.arange(10), 1), seed, 4, in_epochs=True)
        return lambda step: batches.at(step).tokens.flatten().tolist()

    draw = drawn(3)
    rows = [row for step in range(5) for row in draw(step)]
    first, second = rows[:10], rows[10:]
    assert sorted(first) == sorted(second) == list(range(10)) and first != second != sorted(second)
    assert drawn(3)(3) == rows[12:16], "a resumed run's batch"
    assert drawn(4)(0) != rows[:4]
    source = Batches(Rows(some_examples(LENGTHS), 16, False, 0), seed=1, batch_size=8, in_epochs=True)
    assert source.at(0).tokens.shape == (8, 16)
    assert sorted((source.at(0).labels != IGNORED).any(1).tolist()) == [True] * 8
    windows = Batches(Windows(torch.arange(50), 8), seed=0, batch_size=6, in_epochs=True)
    assert windows.rows == 6 and sorted(windows.at(1).tokens[:, 0].tolist()) == [0, 8, 16, 24, 32, 40]


def test_epochs_become_steps_that_the_schedule_fits() -> None:
    tree = {"model": {"config": LLAMA}, "data": {"paths": ["a.txt"]}, "train": {"epochs": 1.5, "warmup_steps": 10}}
    recipe = config.validate(tree, "recipe")
    assert config.in_steps(recipe, 40).train.length == 40
    with pytest.raises(ConfigError, match=r"^1\.5 epochs of this data are 9 steps: train.warmup_steps must be smaller"):
        config.in_steps(recipe, 9)
