"""The wire format: every message comes back as it was, and whatever is not a message is a `WireError` with a reason."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from message_strategies import MESSAGES, addresses, any_message, instances

from protocol import codec
from protocol import messages as m
from protocol.address import Address
from protocol.codec import MAX_FRAME_BYTES, VERSION, WireError, decode, encode
from protocol.placement import Places

TOKEN = "run's token"
GRAD_READY = m.GradReady(step=3, lid=1, counts=(4, 0))


SENDER = Address("trainer", 0)


def frame(fields: Any, *, tag: Any = "GradReady", **parts: Any) -> bytes:
    usual = {"version": VERSION, "tag": tag, "token": TOKEN, "sender": ["trainer", 0], "seq": 0, "fields": fields}
    packed: bytes = msgpack.packb(list((usual | parts).values()))
    return packed


def packed(message: m.Message, seq: int = 0) -> bytes:
    return encode(message, token=TOKEN, sender=SENDER, seq=seq)


def refused(data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        decode(data, token=TOKEN)
    reason = str(caught.value)
    assert reason.rstrip(": "), "a refusal without a reason"
    return reason


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data(), sender=addresses, seq=st.integers(0, 2**63))
@settings(max_examples=25)
def test_round_trip(cls: type, data: st.DataObject, sender: Address, seq: int) -> None:
    message = data.draw(instances(cls))
    envelope = decode(encode(message, token=TOKEN, sender=sender, seq=seq), token=TOKEN)
    assert envelope == codec.Envelope(message, sender, seq)
    assert type(envelope.message) is cls


def test_every_message_of_the_protocol_is_known() -> None:
    """A dataclass of `messages` is a message, or a part of one."""
    parts = {m.Segment, m.Layer, m.LayerTimes, m.CpuUpdate, m.Process, m.RankStatus}
    declared = {cls for cls in vars(m).values() if dataclasses.is_dataclass(cls) and cls.__module__ == m.__name__}
    assert declared - parts - {m.Message} == set(MESSAGES)


def test_an_integer_serves_as_a_float_and_nothing_else_does() -> None:
    report = decode(frame(tag="OptimizerReport", fields=[0, 1, 1, []]), token=TOKEN).message
    assert report == m.OptimizerReport(step=0, threads=1, busy_s=1.0, updates=()) and type(report.busy_s) is float
    assert "expected int, got float" in refused(frame(tag="OptimizerReport", fields=[2.5, 1, 1, []]))
    assert "expected int, got bool" in refused(frame(tag="WeightsReady", fields=[True, 1, []]))
    assert "expected bool, got int" in refused(frame(tag="CommandReply", fields=[1, ""]))


@pytest.mark.parametrize("hyper", [[], ["Segment"], [["AdamWHyper"]], {}, "AdamWHyper"])
def test_hyperparameters_are_those_of_a_rule(hyper: Any) -> None:
    assert "StepBegin: groups: hyperparameters of no known rule" in refused(
        frame(tag="StepBegin", fields=[0, [hyper], False, 0])
    )
    assert "StepBegin: groups: expected" in refused(frame(tag="StepBegin", fields=[0, [["AdamWHyper", 0.1]], False, 0]))


def test_text_that_is_no_utf8_arrives_spelled_out() -> None:
    """A path may be any bytes. It must not end the process that speaks of it."""
    assert decode(packed(m.Ready(detail="folder-\udcff")), token=TOKEN).message == m.Ready(detail="folder-\\udcff")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not msgpack"),
        (packed(GRAD_READY)[:-1], "incomplete"),
        (packed(GRAD_READY) + b"\x00", "extra data"),
        (msgpack.packb("GradReady"), "not an array"),
        (b"\x91" * 5000, "not msgpack: StackError"),
        (b"\xdd\xff\xff\xff\xff", "exceeds max_array_len"),
        (b"\xd4\xff\x00", "timestamp"),
        (pickle.dumps(GRAD_READY), "not msgpack"),
        (b"\x00" * (MAX_FRAME_BYTES + 1), f"frame of {MAX_FRAME_BYTES + 1} bytes"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:12]),
)
def test_what_is_no_frame(data: bytes, reason: str) -> None:
    assert re.search(reason, refused(data))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"version": VERSION + 1}, f"version {VERSION + 1}, expected {VERSION}"),
        ({"token": "another run's"}, "wrong run token"),
        ({"token": TOKEN.encode()}, "wrong run token"),
        ({"tag": "Shutdown"}, "unknown message 'Shutdown'"),
        ({"tag": ["GradReady"]}, "unknown message"),
        ({"seq": -1}, "GradReady: sequence number -1"),
        ({"fields": None}, "GradReady: expected 3 fields"),
        ({"fields": [3, 1, [4], 0]}, "GradReady: expected 3 fields"),
        ({"fields": [3, "1", [4]]}, "GradReady: lid: expected int, got str"),
        ({"fields": [3, 1, 4]}, "GradReady: counts: expected an array"),
        ({"fields": [3, 1, [4.0]]}, "GradReady: counts: expected int, got float"),
        ({"fields": [-3, 1, [4]]}, "GradReady: step -3 is not in [0, inf]"),
        ({"fields": [3, 1, [0]]}, "GradReady: no segment has a gradient"),
        ({"tag": "Log", "fields": [1, {b"loss": 1.0}, None, False]}, "Log: numbers: expected a map with text keys"),
        ({"tag": "Log", "fields": [1, {"loss": "low"}, None, False]}, "Log: numbers: loss: expected float, got str"),
        ({"sender": ["trainer"]}, "GradReady: sender: expected 2 fields"),
        ({"sender": ["trainer", "0"]}, "GradReady: sender: rank: expected int, got str"),
        ({"sender": ["intruder", 0]}, "GradReady: sender: unknown role 'intruder'"),
        ({"sender": ["trainer", -1]}, "GradReady: sender: rank -1 is negative"),
        ({"tag": "Hello", "fields": [0, "trainer-0", 0]}, "Hello: pid 0 is not in [1, "),
        ({"tag": "Hello", "fields": [1, "../trainer-0", 0]}, "Hello: '../trainer-0' is not an inbox name"),
        ({"tag": "PositionsLearned", "fields": [[0, 0]]}, "PositionsLearned: positions must be a permutation"),
        ({"tag": "SetThreads", "fields": [0]}, "SetThreads: threads 0 is not in [1, inf]"),
        (
            {"tag": "Plan", "fields": [0, 0, [["gpu", "disk"]], 0.5, "", "", None]},
            "Plan: places: unknown placements ['disk']",
        ),
        (
            {"tag": "PlanApplied", "fields": [0, 0, [["disk"]], 0, 0.0]},
            "PlanApplied: places: unknown placements ['disk']",
        ),
        ({"tag": "Plan", "fields": [0, 0, [[]], float("nan"), "", "", None]}, "Plan: k nan is not in"),
        ({"tag": "Plan", "fields": [0, -1, [[]], 0.5, "", "", None]}, "Plan: step -1 is not in [0, inf]"),
        ({"tag": "OptimizerReport", "fields": [0, 1, 0.0, [[0]]]}, "OptimizerReport: updates: expected 2 fields"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value),
)
def test_what_is_no_message(parts: dict[str, Any], reason: str) -> None:
    assert reason in refused(frame(**{"fields": [3, 1, [4], False], **parts}))


def layer_table(**changes: Any) -> list[Any]:
    table = {"layers": [[0, 0, "a", segment()]], "inbox": "trainer-0-1f", "device": "cpu", "policy": "deadline"}
    table |= {"objective": "speed", "awaits_verdict": False, "speculate": False, "k": None, "backend": "auto"}
    table |= {"gpu_bytes": None, "host_bytes": None, "continues": False, "threads": None, "rank": 0, "world": 1}
    table |= {"visit": 0.0, "offload_weights": 0.0, "blocks": [], "window_bytes": 0, "ring_bytes": 0, "hold_bytes": 0}
    table |= {"gpu": "", "in_step": False}
    return list((table | changes).values())


def segment(numel: int = 1, **changed: Any) -> list[Any]:
    usual = {"dtype": "float32", "grads_dtype": "float32", "group": 0, "state_dtype": "float32", "key": 0, "start": 0}
    usual |= {"master_dtype": "float32", "rule": "adamw", "shape": [], "by_columns": False, "lanes": 8, "fuses": True}
    return [["w", numel, *(usual | changed).values()]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": []}, "needs a layer"),
        ({"layers": [[1, 0, "a", segment()]]}, "layer IDs must be 0, 1, 2"),
        ({"layers": [[0, 1, "a", segment()]]}, "positions must be a permutation"),
        ({"layers": [[0, 0, "a", []]]}, "layer 0 has no segments"),
        ({"layers": [[-1, 0, "a", segment()]]}, "lid -1 is not in"),
        ({"layers": [[0, 0, "a", segment(0)]]}, "numel 0 is not in"),
        ({"layers": [[0, 0, "a", segment(dtype="float64")]]}, "has dtype 'float64'"),
        ({"layers": [[0, 0, "a", segment(grads_dtype="int8")]]}, "cannot have 'int8' gradients"),
        ({"layers": [[0, 0, "a", segment(rule="adam")]]}, "unknown rule 'adam'"),
        ({"layers": [[0, 0, "a", segment(6, rule="muon", shape=[2, 2])]]}, "'w' of 6 elements is no matrix of shape"),
        ({"layers": [[0, 0, "a", segment(group=-1)]]}, "group -1 is not in"),
        ({"layers": [[0, 0, "a", segment(state_dtype="int8")]]}, "cannot have 'int8' moments"),
        ({"layers": [[0, 0, "a", segment(master_dtype="bfloat16")]]}, "'bfloat16' masters of float32 weights"),
        ({"layers": [[0, 0, "a", segment(key=1 << 32)]]}, "has an impossible key"),
        ({"layers": [[0, 0, "a", segment(start=-1)]]}, "start -1 is not in"),
        ({"policy": "lazy"}, "unknown policy 'lazy'"),
        ({"policy": "fixed"}, 'policy "fixed" needs a k'),
        ({"objective": "fun"}, "unknown objective 'fun'"),
        ({"k": 2.0}, "k 2.0 is not in"),
        ({"visit": 1.5}, "visit 1.5 is not in"),
        ({"offload_weights": -0.5}, "offload_weights -0.5 is not in"),
        ({"blocks": [[0, 0]]}, "a layer is in one block"),
        ({"blocks": [[]]}, "a layer is in one block"),
        ({"blocks": [[1]]}, "blocks are of layers"),
        ({"threads": 0}, "threads 0 is not in"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"device": b"cpu"}, "LayerTable: device: expected str, got bytes"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value),
)
def test_what_is_no_layer_table(changes: dict[str, Any], reason: str) -> None:
    decode(frame(tag="LayerTable", fields=layer_table()), token=TOKEN)
    assert reason in refused(frame(tag="LayerTable", fields=layer_table(**changes)))


@given(instances(m.Rejoin), st.booleans())
def test_a_rejoin_places_each_layer_now_and_with_its_plan(rejoin: m.Rejoin, now: bool) -> None:
    more = Places((*rejoin.places.names, "cpu"))
    changed: dict[str, Any] = {"places": more} if now else {"plan": dataclasses.replace(rejoin.plan, places=more)}
    with pytest.raises(ValueError, match="each layer has a placement"):
        dataclasses.replace(rejoin, **changed)


def test_a_message_that_no_receiver_would_take_is_not_sent() -> None:
    with pytest.raises(WireError, match="CommandReply takes .* bytes, above"):
        packed(m.CommandReply(ok=True, text="x" * MAX_FRAME_BYTES))


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


def survives(data: bytes) -> None:
    """A message, or a `WireError`: any other exception fails the test."""
    try:
        envelope = decode(data, token=TOKEN)
    except WireError as error:
        assert str(error)
    else:
        assert type(envelope.message) in MESSAGES


@given(message=any_message, data=st.data())
@settings(max_examples=400)
def test_a_message_with_a_value_exchanged(message: m.Message, data: st.DataObject) -> None:
    """Close to a message, which reaches deeper than junk."""
    parts = msgpack.unpackb(packed(message, seq=1), strict_map_key=False)
    place = parts
    while isinstance(place, list) and place:
        index = data.draw(st.integers(0, len(place) - 1))
        if not isinstance(place[index], list) or not place[index] or data.draw(st.booleans()):
            place[index] = data.draw(junk)
            break
        place = place[index]
    survives(msgpack.packb(parts))


@given(message=any_message, data=st.data())
@settings(max_examples=300)
@example(message=GRAD_READY, data=None)
def test_a_frame_with_damaged_bytes(message: m.Message, data: st.DataObject | None) -> None:
    whole = bytearray(packed(message, seq=1))
    if data is not None:
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(whole))
    survives(bytes(whole[: len(whole) // 2]))
