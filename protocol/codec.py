"""Encodes messages as bytes and decodes them. The only module that imports msgpack.

A frame is the msgpack array `[version, tag, token, [role, rank], seq, fields]`: the protocol's version, the message's
class name, the run's secret token, the sender's address, its sequence number, and the fields in their declared order.
Hyperparameters are those of one of several rules, so their class's name comes before their fields.
`decode` trusts no input. It returns a message with the declared types and ranges, or raises a `WireError` whose reason
the receiver logs before it drops the frame.
"""

from __future__ import annotations

import dataclasses
import hmac
import types
import typing
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar

import msgpack

from protocol import messages
from protocol.address import Address
from protocol.messages import Message
from protocol.rules import HYPERS, Hyper

VERSION: Final = 3
MAX_FRAME_BYTES: Final = 16 << 20

MESSAGES: Final[dict[str, type[Message]]] = {
    name: cls for name, cls in vars(messages).items() if isinstance(cls, type) and Message in cls.__bases__
}
T = TypeVar("T")


class WireError(ValueError):
    """A frame that is not a message of this run: malformed, too large, wrong version, wrong token."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded frame: the message, its sender, and the sender's sequence number."""

    message: Message
    sender: Address
    seq: int


def encode(message: Message, *, token: str, sender: Address, seq: int) -> bytes:
    """`message` as one frame. Raises `WireError` if it is larger than `MAX_FRAME_BYTES`."""
    parts = [VERSION, type(message).__name__, token, _plain(sender), seq, _plain(message)]
    # Python represents a path that is not UTF-8 with lone surrogates. They are escaped here instead of failing.
    frame: bytes = msgpack.packb(parts, unicode_errors="backslashreplace")
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} takes {len(frame)} bytes, above {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes, *, token: str) -> Envelope:
    """The message in `frame`. Raises `WireError`, and no other exception, for anything else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, above {MAX_FRAME_BYTES}")
    try:
        parts = msgpack.unpackb(frame, use_list=True, strict_map_key=True, raw=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not msgpack: {str(error) or type(error).__name__}") from None
    if not isinstance(parts, list) or len(parts) != 6:
        raise WireError("not an array of version, tag, token, sender, seq, fields")
    version, tag, claimed, sender, seq, fields = parts
    if type(version) is not int or version != VERSION:
        raise WireError(f"version {version!r}, expected {VERSION}")
    if not isinstance(claimed, str) or not hmac.compare_digest(claimed.encode(), token.encode()):
        raise WireError("wrong run token")
    if not isinstance(tag, str) or tag not in MESSAGES:
        raise WireError(f"unknown message {tag!r}")
    if type(seq) is not int or seq < 0:
        raise WireError(f"{tag}: sequence number {seq!r}")
    address = _build(Address, sender, f"{tag}: sender")
    return Envelope(_build(MESSAGES[tag], fields, tag), address, seq)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return [type(value).__name__, *fields] if isinstance(value, Hyper) else fields
    if isinstance(value, tuple) and not (value and isinstance(value[0], str | int | float)):  # as the others, then
        return [_plain(item) for item in value]
    return value


@cache
def _schema(cls: Hashable) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(cls, vars(messages))
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(typing.cast(Any, cls)))


def _build(cls: type[T], fields: Any, where: str) -> T:
    schema = _schema(typing.cast(Hashable, cls))
    if not isinstance(fields, list) or len(fields) != len(schema):
        raise WireError(f"{where}: expected {len(schema)} fields")
    values = {name: _check(hint, value, f"{where}.{name}") for (name, hint), value in zip(schema, fields)}
    try:
        return cls(**values)
    except ValueError as error:
        raise WireError(f"{where}: {error}") from None


def _check(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint` declares. Raises a `WireError` that names the field."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise WireError(f"{where}: expected an array")
        item = typing.get_args(hint)[0]
        return tuple(_check(item, element, where) for element in value)
    if origin is types.UnionType:
        if value is None:
            return None
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        return _check(inner, value, where)
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise WireError(f"{where}: expected a map with text keys")
        item = typing.get_args(hint)[1]
        return {key: _check(item, element, f"{where}.{key}") for key, element in value.items()}
    if hint is Hyper:
        if not (isinstance(value, list) and value and isinstance(value[0], str) and value[0] in HYPERS):
            raise WireError(f"{where}: hyperparameters of no known rule")
        return _build(HYPERS[value[0]], value[1:], where)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise WireError(f"{where}: expected {hint.__name__}, got {type(value).__name__}")
    return value
