"""Frames to messages and back: limits, checksums, one decode per message.

On the wire a message is `[head]` or `[head, body]`. The head is 2 bytes of magic, 1 byte protocol version, 1 byte
type, then one msgpack map of at most `HEAD_LIMIT` bytes (HELLO, WELCOME and RESUME: `OPENING_LIMIT`, since they list
leases or deliveries).
A message with bodies has exactly two frames; the body frame is a run of items, each
`u32 meta length, u32 body length, meta (msgpack array), body`; its length and CRC-32 are in the head. Bodies are
opaque here. Anything else raises `ProtocolError`; nothing but that comes out of `decode`.
"""

from __future__ import annotations

import math
import struct
import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from rollmq import messages
from rollmq.errors import ProtocolError
from rollmq.messages import PROTOCOL_VERSION, Message

MAGIC = b"RQ"
HEAD_LIMIT = 4096
OPENING_LIMIT = 65536
MAX_ITEMS = 512
MAX_RECORDS = 4096
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_FRAME_BYTES = 64 * 1024 * 1024
DEFAULT_TEXT_LIMIT = 128
BYTES_LIMIT = 64
INT_LIMIT = 2**63
FIRST_INTERNAL_TYPE = 128
"""From here on, types are events that only the journal sees."""

_PREFIX = struct.Struct("<2sBB")
_ITEM = struct.Struct("<II")
_M = TypeVar("_M")

Check = Callable[[Any], Any]
"""Takes a decoded msgpack value, returns the typed value or raises ValueError."""


@dataclass(frozen=True, slots=True)
class Field:
    """How one field of a record is checked on the way in and flattened on the way out."""

    name: str
    check: Check
    flatten: Callable[[Any], Any]
    required: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The fields of one message type; `items` and `bodies` travel in the body frame."""

    cls: type[Message]
    head: tuple[Field, ...]
    items: Field | None
    item_fields: tuple[Field, ...]
    item_class: type | None
    has_bodies: bool
    limit: int


# --- encoding -----------------------------------------------------------------------------------------------------


def encode(message: Message) -> list[bytes]:
    """The frames of a message, without a routing id.

    Raises:
        ProtocolError: it is over a limit.
    """
    layout = _layout_of(type(message))
    head = {f.name: f.flatten(getattr(message, f.name)) for f in layout.head}
    if not layout.has_bodies:
        return [_head_frame(layout, head)]
    body = _encode_items(layout, message)
    head["body_length"] = len(body)
    head["body_crc"] = zlib.crc32(body)
    return [_head_frame(layout, head), body]


def _head_frame(layout: Layout, head: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(head, use_bin_type=True)
    if len(packed) > layout.limit:
        raise ProtocolError(
            f"{layout.cls.__name__} head of {len(packed)} bytes is over {layout.limit}; send fewer records at once"
        )
    return _PREFIX.pack(MAGIC, PROTOCOL_VERSION, layout.cls.TYPE) + packed


def _encode_items(layout: Layout, message: Any) -> bytes:
    bodies: tuple[bytes, ...] = message.bodies
    items = message.items if layout.items is not None else ((),) * len(bodies)
    if len(items) != len(bodies) or not 1 <= len(items) <= MAX_ITEMS:
        raise ProtocolError(
            f"{layout.cls.__name__} has {len(items)} items and {len(bodies)} bodies; "
            f"they must match and be 1 to {MAX_ITEMS}"
        )
    parts: list[bytes] = []
    for item, body in zip(items, bodies, strict=True):
        meta: bytes = msgpack.packb([f.flatten(getattr(item, f.name)) for f in layout.item_fields], use_bin_type=True)
        parts += (_ITEM.pack(len(meta), len(body)), meta, body)
    return b"".join(parts)


def pack_record(message: Message) -> bytes:
    """A message without its bodies as one msgpack array `[type, map]`, for the journal."""
    layout = _layout_of(type(message))
    content = {f.name: f.flatten(getattr(message, f.name)) for f in layout.head}
    if layout.items is not None and layout.has_bodies:
        content["items"] = layout.items.flatten(message.items)  # type: ignore[attr-defined]
    packed: bytes = msgpack.packb([layout.cls.TYPE, content], use_bin_type=True)
    return packed


def unpack_record(data: bytes) -> Message:
    """The inverse of `pack_record`; `bodies` is empty.

    Raises:
        ProtocolError: the bytes are not such a record.
    """
    raw = _unpack(data, "journal record")
    if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[1], dict):
        raise ProtocolError("journal record is not [type, map]")
    layout = _layout_by_type(raw[0])
    values = dict(raw[1])
    extra: dict[str, Any] = {}
    if layout.items is not None and layout.has_bodies:
        extra["items"] = _checked(layout.items, values.pop("items", None))
    if layout.has_bodies:
        extra["bodies"] = ()
    return layout.cls(**_checked_fields(layout, values), **extra)


# --- decoding -----------------------------------------------------------------------------------------------------


def decode(frames: Sequence[bytes]) -> Message:
    """The message in frames (routing id removed).

    Raises:
        ProtocolError: they are not exactly one legal message.
    """
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"a message has 1 or 2 frames, not {len(frames)}")
    layout, head = _decode_head(frames[0])
    if not layout.has_bodies:
        if len(frames) != 1:
            raise ProtocolError(f"{layout.cls.__name__} has exactly 1 frame, not {len(frames)}")
        return layout.cls(**_checked_fields(layout, head))
    if len(frames) != 2:
        raise ProtocolError(f"{layout.cls.__name__} has exactly 2 frames, not {len(frames)}")
    body = frames[1]
    _check_body(layout, head, body)
    items, bodies = _decode_items(layout, body)
    extra: dict[str, Any] = {"bodies": bodies}
    if layout.items is not None:
        extra["items"] = items
    return layout.cls(**_checked_fields(layout, head), **extra)


def _decode_head(frame: bytes) -> tuple[Layout, dict[str, Any]]:
    if len(frame) < _PREFIX.size:
        raise ProtocolError(f"head of {len(frame)} bytes is shorter than its prefix")
    magic, version, kind = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError(f"magic is {magic!r}, not {MAGIC!r}: the peer does not speak rollmq")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version} is not {PROTOCOL_VERSION}: use the same rollmq on both ends")
    if kind >= FIRST_INTERNAL_TYPE:
        raise ProtocolError(f"message type {kind} is of the broker's own events and may not be sent")
    layout = _layout_by_type(kind)
    if len(frame) - _PREFIX.size > layout.limit:
        raise ProtocolError(f"{layout.cls.__name__} head of {len(frame)} bytes is over {layout.limit}")
    head = _unpack(frame[_PREFIX.size :], f"{layout.cls.__name__} head")
    if not isinstance(head, dict):
        raise ProtocolError(f"{layout.cls.__name__} head is not a map")
    return layout, head


def _check_body(layout: Layout, head: dict[str, Any], body: bytes) -> None:
    length, crc = head.pop("body_length", None), head.pop("body_crc", None)
    if length != len(body) or isinstance(length, bool):
        raise ProtocolError(f"{layout.cls.__name__} body has {len(body)} bytes, its head says {length!r}")
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{layout.cls.__name__} body of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    if crc != zlib.crc32(body):
        raise ProtocolError(f"{layout.cls.__name__} body of {len(body)} bytes fails its checksum")


def _decode_items(layout: Layout, body: bytes) -> tuple[tuple[Any, ...], tuple[bytes, ...]]:
    items: list[Any] = []
    bodies: list[bytes] = []
    position, end = 0, len(body)
    name = layout.cls.__name__
    while position < end:
        if len(bodies) == MAX_ITEMS:
            raise ProtocolError(f"{name} holds more than {MAX_ITEMS} items")
        if end - position < _ITEM.size:
            raise ProtocolError(f"{name} body ends inside an item's lengths")
        meta_length, body_length = _ITEM.unpack_from(body, position)
        position += _ITEM.size
        if meta_length > HEAD_LIMIT or body_length > MAX_BODY_BYTES or position + meta_length + body_length > end:
            raise ProtocolError(f"{name} item of {meta_length}+{body_length} bytes is over a limit or the frame")
        meta = _unpack(body[position : position + meta_length], f"{name} item")
        items.append(_record(layout.item_class, layout.item_fields, meta, name) if layout.item_class else meta)
        position += meta_length
        bodies.append(body[position : position + body_length])
        position += body_length
    if not bodies:
        raise ProtocolError(f"{name} holds no item")
    return tuple(items), tuple(bodies)


def _checked_fields(layout: Layout, head: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for f in layout.head:
        if f.name in head:
            values[f.name] = _checked(f, head.pop(f.name), layout.cls.__name__)
        elif f.required:
            raise ProtocolError(f"{layout.cls.__name__} lacks {f.name}")
    if head:
        raise ProtocolError(f"{layout.cls.__name__} has unknown fields {sorted(map(str, head))[:5]}")
    return values


def _checked(f: Field, value: Any, where: str = "record") -> Any:
    try:
        return f.check(value)
    except ValueError as error:
        raise ProtocolError(f"{where}.{f.name}: {error}") from error


def _record(cls: type[_M], record_fields: tuple[Field, ...], value: Any, where: str) -> _M:
    if not isinstance(value, list) or len(value) != len(record_fields):
        raise ProtocolError(f"{where}: a {cls.__name__} is an array of {len(record_fields)}")
    return cls(*[_checked(f, v, where) for f, v in zip(record_fields, value, strict=True)])


def _unpack(data: bytes, what: str) -> Any:
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique_keys,
            ext_hook=_refuse_ext,
            max_str_len=OPENING_LIMIT,
            max_bin_len=OPENING_LIMIT,
            max_array_len=MAX_RECORDS,
            max_map_len=64,
            max_ext_len=0,
        )
    except (ValueError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"{what} of {len(data)} bytes does not decode: {error}") from error


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _refuse_ext(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} is not allowed")


# --- layouts from type hints --------------------------------------------------------------------------------------


def _check_int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < INT_LIMIT:
        raise ValueError(f"{value!r:.60} is not an integer in [0, 2**63)")
    return value


def _check_float(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r:.60} is not a finite number >= 0")
    return float(value)


def _check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r:.60} is not a boolean")
    return value


def _check_bytes(value: Any) -> bytes:
    if type(value) is not bytes or len(value) > BYTES_LIMIT:
        raise ValueError(f"not a byte string of at most {BYTES_LIMIT}")
    return value


def _text_check(limit: int) -> Check:
    def check(value: Any) -> str:
        if type(value) is not str or len(value) > limit:
            raise ValueError(f"not a text of at most {limit} characters")
        return value

    return check


def _enum_check(cls: type[StrEnum]) -> Check:
    def check(value: Any) -> StrEnum:
        if type(value) is not str:
            raise ValueError(f"{value!r:.60} is not a {cls.__name__}")
        return cls(value)

    return check


def _optional_check(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def _tuple_check(inner: Check) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > MAX_RECORDS:
            raise ValueError(f"not an array of at most {MAX_RECORDS}")
        return tuple([inner(v) for v in value])

    return check


def _record_check(cls: type) -> Check:
    record_fields = _fields_of(cls)

    def check(value: Any) -> Any:
        try:
            return _record(cls, record_fields, value, cls.__name__)
        except ProtocolError as error:
            raise ValueError(str(error)) from error

    return check


def _plain(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    return str(value)


def _converter(hint: Any, limit: int) -> tuple[Check, Callable[[Any], Any]]:
    """The check and the flattener of one type hint."""
    simple: dict[Any, Check] = {int: _check_int, float: _check_float, bool: _check_bool, bytes: _check_bytes}
    if hint in simple:
        return simple[hint], _plain
    if hint is str:
        return _text_check(limit), _plain
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum_check(hint), _text
    if get_origin(hint) in (Union, types.UnionType):
        inner = next(arg for arg in get_args(hint) if arg is not type(None))
        check, flatten = _converter(inner, limit)
        return _optional_check(check), lambda value: None if value is None else flatten(value)
    if get_origin(hint) is tuple:
        check, flatten = _converter(get_args(hint)[0], limit)
        return _tuple_check(check), lambda value: [flatten(v) for v in value]
    if is_dataclass(hint) and isinstance(hint, type):
        record_fields = _fields_of(hint)
        return _record_check(hint), lambda value: [f.flatten(getattr(value, f.name)) for f in record_fields]
    raise TypeError(f"no wire form for {hint!r}")


def _fields_of(cls: type, skip: frozenset[str] = frozenset()) -> tuple[Field, ...]:
    hints = get_type_hints(cls)
    result = []
    for f in fields(cls):
        if f.name in skip:
            continue
        check, flatten = _converter(hints[f.name], f.metadata.get("max", DEFAULT_TEXT_LIMIT))
        required = f.default is MISSING and f.default_factory is MISSING
        result.append(Field(f.name, check, flatten, required))
    return tuple(result)


def _build_layout(cls: type[Message]) -> Layout:
    names = {f.name for f in fields(cls)}
    has_bodies = "bodies" in names
    skip = frozenset({"items", "bodies"}) if has_bodies else frozenset()
    items: Field | None = None
    item_class: type | None = None
    if has_bodies and "items" in names:
        hint = get_type_hints(cls)["items"]
        check, flatten = _converter(hint, DEFAULT_TEXT_LIMIT)
        items, item_class = Field("items", check, flatten, True), get_args(hint)[0]
    return Layout(
        cls=cls,
        head=_fields_of(cls, skip),
        items=items,
        item_fields=_fields_of(item_class) if item_class else (),
        item_class=item_class,
        has_bodies=has_bodies,
        limit=OPENING_LIMIT if cls in (messages.Hello, messages.Welcome, messages.Resume) else HEAD_LIMIT,
    )


_LAYOUTS: dict[type[Message], Layout] = {}
_BY_TYPE: dict[int, Layout] = {}


def register(cls: type[_M]) -> type[_M]:
    """Adds a message class (also used by the broker for events that only the journal sees)."""
    assert issubclass(cls, Message)
    layout = _build_layout(cls)
    if cls.TYPE in _BY_TYPE:
        raise TypeError(f"message type {cls.TYPE} is taken by {_BY_TYPE[cls.TYPE].cls.__name__}")
    _LAYOUTS[cls] = _BY_TYPE[cls.TYPE] = layout
    return cls


def _layout_of(cls: type[Message]) -> Layout:
    return _LAYOUTS[cls]


def _layout_by_type(kind: Any) -> Layout:
    layout = _BY_TYPE.get(kind) if type(kind) is int else None
    if layout is None:
        raise ProtocolError(f"message type {kind!r:.20} is unknown to protocol version {PROTOCOL_VERSION}")
    return layout


for _cls in vars(messages).values():
    if isinstance(_cls, type) and issubclass(_cls, Message) and _cls is not Message:
        register(_cls)
