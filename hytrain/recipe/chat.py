"""Conversations, and prompts with completions, as tokens of which only the answers are learnt.

    {"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}, …]}
    {"prompt": "…", "completion": "…"}          also as two lists of messages

Messages become text by the tokenizer's chat template. The template says where the answers are: by `{% generation %}`,
or else because the text up to an answer, and the text with it, are both beginnings of the whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from hytrain.errors import ConfigError
from hytrain.recipe.tables import Row
from hytrain.recipe.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Example(NamedTuple):
    """The tokens of one row, int32, and which of them are learnt, bool; both 1-D. The first is never learnt."""

    tokens: NDArray[np.int32]
    learnt: NDArray[np.bool_]


def set_template(words: TextTokenizer, wanted: Literal["chatml"] | Path | None) -> None:
    """Gives the tokenizer the recipe's chat template; it is saved with the tokenizer. Raises ConfigError."""
    try:
        if wanted is not None:
            words.hf.chat_template = CHATML if wanted == "chatml" else Path(wanted).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {wanted} can't be read: {error}.") from None


def examples(words: TextTokenizer, rows: Iterable[tuple[str, Row]], limit: int) -> list[Example]:
    """The rows as examples of at most `limit` tokens. Says how many were cut or left out.

    Raises ConfigError for a row that is neither a conversation nor a prompt with its completion, and if no row has an
    answer.
    """
    found, empty, cut, beyond = list[Example](), 0, 0, 0
    for place, row in rows:
        try:
            numbers, learnt = encode(words, row)
        except (ConfigError, TemplateError) as error:
            raise ConfigError(f"{place} {error}") from None
        if not any(learnt[1:]):
            empty += 1
        elif not any(learnt[1:limit]):
            beyond += 1
        else:
            cut += len(numbers) > limit
            mask = np.array(learnt[:limit])
            mask[0] = False
            found.append(Example(np.array(numbers[:limit], np.int32), mask))
    for count, fate in (
        (empty, "have no answer, or an empty one, and are left out"),
        (beyond, f"have no answer within data.sequence_length, {limit} tokens, and are left out"),
        (cut, f"are longer than data.sequence_length, {limit} tokens, and end there"),
    ):
        if count:
            log.warning("%d of %d examples %s", count, len(found) + empty + beyond, fate)
    if not found:
        raise ConfigError(
            f"None of the {empty + beyond} examples in data.paths has an answer within {limit} tokens; "
            "correct the data, or enlarge data.sequence_length."
        )
    return found


def encode(words: TextTokenizer, row: Row) -> tuple[list[int], list[bool]]:
    """Token numbers, and which of them belong to an answer; none do if an answer is empty.

    Raises ConfigError with the end of a sentence that begins with the row's place.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    if row.get("messages") is not None:
        return _conversation(words, [], _messages(row["messages"]), row.get("tools"))
    if isinstance(prompt, str) and isinstance(completion, str):
        return _completion(words, prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation(words, _messages(prompt), _messages(completion), row.get("tools"))
    raise ConfigError(
        f"has the columns {', '.join(row)}, but data.kind: chat needs messages, or prompt and completion as two texts "
        "or two lists of messages."
    )


def texts(row: Row) -> Iterator[str]:
    """What is said in a row, for the training of a tokenizer."""
    for column in ("messages", "prompt", "completion"):
        said = row.get(column)
        for message in said if isinstance(said, list) else [{"content": said}]:
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else [{"text": content}]:
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    yield part["text"]


def opening(words: TextTokenizer, prompt: str, conversation: bool) -> tuple[list[int], str]:
    """The tokens before the answer to a prompt, and the text that ends an answer, empty if there is none."""
    if not conversation:
        return [*_beginning(words), *_numbers(words, prompt)], words.hf.eos_token or ""
    asked: Messages = [{"role": "user", "content": prompt}]
    before = _rendered(words, asked, None, add_generation_prompt=True)
    answered = _rendered(words, [*asked, {"role": "assistant", "content": "x"}], None)
    return _numbers(words, before), answered[len(before) :].removeprefix("x").strip() or words.hf.eos_token or ""


def _completion(words: TextTokenizer, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    """The prompt, the completion and the token that ends a text, if the tokenizer has one."""
    before, whole = _numbers(words, prompt), _numbers(words, prompt + completion)
    if whole[: len(before)] != before:  # a token across the border, which a model that continues the prompt never sees
        whole = before + _numbers(words, completion)
    begin = _beginning(words)
    end = [] if words.hf.eos_token_id is None else [words.hf.eos_token_id]
    answer = len(whole) - len(before) + len(end)
    return [*begin, *whole, *end], [False] * (len(begin) + len(before)) + [bool(completion.strip())] * answer


def _conversation(
    words: TextTokenizer, asked: Messages, answered: Messages, tools: Any
) -> tuple[list[int], list[bool]]:
    if words.hf.chat_template == CHATML:
        asked, answered = ([_in_one_text(message) for message in part] for part in (asked, answered))
    messages = [*asked, *answered]
    template = words.hf.chat_template and words.hf.get_chat_template(tools=tools)
    if not template:
        raise ConfigError(
            "is a conversation, but the tokenizer has no chat template; set tokenizer.chat_template: chatml, or name a "
            "file with a template there."
        )
    if not words.hf.is_fast:
        raise ConfigError("is a conversation, which needs a fast tokenizer: only those tell the place of each token.")
    if GENERATION.search(template):
        encoded = words.hf.apply_chat_template(
            messages,
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        border = len(_rendered(words, asked, tools, add_generation_prompt=True)) if asked else 0
        learnt = [bool(mark) for mark in encoded["assistant_masks"]]
        offsets = encoded["offset_mapping"]
        for i in range(1, len(learnt)):  # a character's later bytes are not marked
            learnt[i] = learnt[i] or (learnt[i - 1] and offsets[i] == offsets[i - 1])
        learnt = [mark and end > border for mark, (_, end) in zip(learnt, offsets, strict=True)]
    else:
        whole = _rendered(words, messages, tools)
        encoded = words.hf(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = list(_answers(words, messages, len(asked), whole, tools))
        offsets = encoded["offset_mapping"]
        learnt = [any(start < last and first < end for first, last in spans) for start, end in offsets]
    if any(_is_empty(message) for message in answered):
        learnt = [False] * len(learnt)
    return list(encoded["input_ids"]), learnt


def _answers(words: TextTokenizer, messages: Messages, first: int, whole: str, tools: Any) -> Iterator[tuple[int, int]]:
    """Where the answers from message `first` on begin and end in the text `whole`."""
    for i in range(first, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        before = _rendered(words, messages[:i], tools, add_generation_prompt=True)
        after = _rendered(words, messages[: i + 1], tools)
        if not (whole.startswith(after) and after.startswith(before)):
            raise ConfigError(
                "can't be learnt from, because the chat template renders the beginning of this conversation "
                "differently when more follows; mark the answers in the template with {% generation %}, and name its "
                "file as tokenizer.chat_template."
            )
        yield len(before), len(after)


def _rendered(words: TextTokenizer, messages: Messages, tools: Any, add_generation_prompt: bool = False) -> str:
    text = words.hf.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return str(text)


def _messages(value: object) -> Messages:
    """Messages without the empty fields that tables give them."""
    if not isinstance(value, list) or not value:
        raise ConfigError("has something else where a list of messages belongs.")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError('has a message that is not of the form {"role": "user", "content": "text"}.')
        if not isinstance(message.get("content") or "", (str, list)):
            raise ConfigError("has a message whose content is not a text.")
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def _in_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as a text, which may come in parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise ConfigError("has a message with parts other than text, which chatml cannot hold.")
    return message | {"content": "".join(part["text"] for part in content)}


def _is_empty(message: dict[str, Any]) -> bool:
    content = message.get("content") or ""
    empty = not content.strip() if isinstance(content, str) else False
    return message["role"] == "assistant" and empty and not message.get("tool_calls")


def _numbers(words: TextTokenizer, text: str) -> list[int]:
    return words.encode(text.encode()).tolist()


def _beginning(words: TextTokenizer) -> list[int]:
    """The token that the tokenizer puts before every text, or none."""
    bos = words.hf.bos_token_id
    return [bos] if bos is not None and words.hf("")["input_ids"][:1] == [bos] else []
