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
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgpack

from protocol import messages
from protocol.address import Address
from protocol.messages import Message
from protocol.rules import HYPERS, Hyper

VERSION: Final = 9
MAX_FRAME_BYTES: Final = 16 << 20

MESSAGES: Final[dict[str, type[Message]]] = {
    name: cls for name, cls in vars(messages).items() if isinstance(cls, type) and Message in cls.__bases__
}


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
    address = _within(f"{tag}: sender", _reader(Address), sender)
    return Envelope(_within(tag, _reader(typing.cast(Hashable, MESSAGES[tag])), fields), address, seq)


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """What turns a decoded value into one that `hint` declares, or raises ValueError. Made once for each type."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _array_reader(typing.get_args(hint)[0])
    if origin in (types.UnionType, typing.Union):
        (inner,) = (_reader(arg) for arg in typing.get_args(hint) if arg is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin is dict:
        return _map_reader(_reader(typing.get_args(hint)[1]))
    if hint is Hyper:
        return _hyper
    if dataclasses.is_dataclass(hint):
        return _fields_reader(typing.cast(type, hint))

    def read(value: Any) -> Any:
        if type(value) is hint:
            return value
        if hint is float and type(value) is int:
            return float(value)
        raise WireError(f"expected {hint.__name__}, got {type(value).__name__}")

    return read


def _array_reader(item: Any) -> Callable[[Any], Any]:
    read = _reader(item)
    is_scalar = item in (bool, int, float, str)

    def read_array(value: Any) -> Any:
        if not isinstance(value, list):
            raise WireError("expected an array")
        if is_scalar and all(type(element) is item for element in value):
            return tuple(value)
        return tuple(map(read, value))

    return read_array


def _map_reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_map(value: Any) -> Any:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise WireError("expected a map with text keys")
        return {key: _within(key, read, element) for key, element in value.items()}

    return read_map


def _fields_reader(cls: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(cls, vars(messages))
    schema = [(name, _reader(hints[name])) for name in _names(cls) or ()]

    def read_fields(fields: Any) -> Any:
        if not isinstance(fields, list) or len(fields) != len(schema):
            raise WireError(f"expected {len(schema)} fields")
        values, name = {}, ""
        try:
            for (name, read), value in zip(schema, fields):
                values[name] = read(value)
        except ValueError as error:
            raise WireError(f"{name}: {error}") from None
        return cls(**values)

    return read_fields


def _within(name: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise WireError(f"{name}: {error}") from None


def _hyper(value: Any) -> Any:
    if not (isinstance(value, list) and value and isinstance(value[0], str) and value[0] in HYPERS):
        raise WireError("hyperparameters of no known rule")
    return _reader(typing.cast(Hashable, HYPERS[value[0]]))(value[1:])


#: The types of most values, which msgpack takes.
_PLAIN: Final = frozenset({int, float, str, bool, bytes, types.NoneType})


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if (names := _names(typing.cast(Hashable, type(value)))) is not None:
        fields = [each if type(each := getattr(value, name)) in _PLAIN else _plain(each) for name in names]
        return [type(value).__name__, *fields] if isinstance(value, Hyper) else fields
    if isinstance(value, tuple) and not (value and isinstance(value[0], str | int | float)):  # as the others, then
        return [_plain(item) for item in value]
    return value


@cache
def _names(cls: Hashable) -> tuple[str, ...] | None:
    """The names of a dataclass's fields; None of another type."""
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None
