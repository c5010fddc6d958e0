"""How an object lies in the store: pieces, each behind a checked header.

Owns the 56 bytes before every stored value, their checksum, and the cut of a large object into
pieces. Does not own keys' meaning, disks or answers to clients: what fails its check raises
`CorruptError`, and the caller decides (count it, delete it, answer a miss). Pure.

LMDB gives a large value whole pages with 16 bytes of page header in front, so a piece of 65,520
bytes takes 16 pages exactly, and pages of equal runs never fragment: 65,464 bytes of payload and
the header:

    offset  bytes  field
         0      2  magic 0xE35C
         2      1  version 1
         3      1  flags, 0
         4      4  namespace_id
         8      8  epoch of the view it was written under
        16     16  write_id, unique for each put of an object: pieces of two puts never mix
        32      4  raw_bytes of the whole object
        36      4  stored_bytes of this piece
        40      1  algorithm, 0: stored as it is
        41      7  charged_bytes of the whole object (design 2.2)
        48      8  xxh3_64 over bytes 0 to 47, the key and the payload

All little endian. The key is in the checksum, so a value under another key is found as well. Piece
0 has the object's own key; piece i has that key and i in two bytes, big endian, so that a scan
meets the pieces in order. Keys of objects are of one length, so no piece's key is another
object's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from cmnet.errors import CorruptError

HEADER_BYTES = 56
VALUE_BYTES_MAX = 65_520
PAYLOAD_BYTES_MAX = VALUE_BYTES_MAX - HEADER_BYTES
PIECES_MAX = 2**16
CHARGED_BYTES_MAX = 2**56 - 1

_MAGIC = 0xE35C
_VERSION = 1
_HEAD = struct.Struct("<HBBIQ16sIIB7s")
_CHECKSUM = struct.Struct("<Q")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an object beside its bytes; equal in all its pieces."""

    namespace_id: int
    epoch: int
    write_id: int
    raw_bytes: int
    charged_bytes: int


class Record(msgspec.Struct, frozen=True):
    """An object as read back (or one piece of it, from `decode`)."""

    header: Header
    payload: bytes


def encode(key: bytes, header: Header, payload: bytes) -> bytes:
    """One value: header, checksum, payload of one piece."""
    assert len(payload) <= PAYLOAD_BYTES_MAX
    assert header.charged_bytes <= CHARGED_BYTES_MAX
    head = _HEAD.pack(
        _MAGIC,
        _VERSION,
        0,
        header.namespace_id,
        header.epoch,
        header.write_id.to_bytes(16, "little"),
        header.raw_bytes,
        len(payload),
        0,
        header.charged_bytes.to_bytes(7, "little"),
    )
    return b"".join((head, _CHECKSUM.pack(_checksum(head, key, payload)), payload))


def decode(key: bytes, value: bytes) -> Record:
    """The piece behind a value read under this key. Raises CorruptError naming what is wrong."""
    if len(value) < HEADER_BYTES:
        raise _corrupt(key, f"{len(value)} bytes are shorter than a header")
    fields = _HEAD.unpack_from(value)
    magic, version, flags, namespace_id, epoch, write_id, raw, stored, algorithm, charged = fields
    if magic != _MAGIC:
        raise _corrupt(key, f"magic {magic:#06x}")
    if (version, flags, algorithm) != (_VERSION, 0, 0):
        raise _corrupt(key, f"version {version}, flags {flags}, algorithm {algorithm}")
    payload = value[HEADER_BYTES:]
    if len(payload) != stored:
        raise _corrupt(key, f"{len(payload)} bytes of payload, {stored} stored")
    (checksum,) = _CHECKSUM.unpack_from(value, _HEAD.size)
    if checksum != _checksum(value[: _HEAD.size], key, payload):
        raise _corrupt(key, "checksum")
    header = Header(
        namespace_id=namespace_id,
        epoch=epoch,
        write_id=int.from_bytes(write_id, "little"),
        raw_bytes=raw,
        charged_bytes=int.from_bytes(charged, "little"),
    )
    return Record(header, payload)


def pieces_of(raw_bytes: int) -> int:
    """Pieces of an object of so many bytes; an empty one has one."""
    return max(1, -(-raw_bytes // PAYLOAD_BYTES_MAX))


def piece_key(key: bytes, index: int) -> bytes:
    """Where piece ``index`` of the object of this key lies."""
    return key if index == 0 else key + index.to_bytes(2, "big")


def split(key: bytes, header: Header, payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of an object's pieces, to be put in one commit.

    Whoever replaces an object by a shorter one deletes the pieces left over in that commit; keys
    that name their content never need it.
    """
    assert header.raw_bytes == len(payload) <= PIECES_MAX * PAYLOAD_BYTES_MAX
    for index in range(pieces_of(len(payload))):
        begin = index * PAYLOAD_BYTES_MAX
        at = piece_key(key, index)
        yield at, encode(at, header, payload[begin : begin + PAYLOAD_BYTES_MAX])


def join(key: bytes, get: Callable[[bytes], bytes | None]) -> Record | None:
    """The whole object, read piece by piece with ``get``; None if there is none of this key.

    Raises CorruptError if a piece is missing, of another put, or fails its check.
    """
    value = get(key)
    if value is None:
        return None
    first = decode(key, value)
    payloads = [first.payload]
    for index in range(1, pieces_of(first.header.raw_bytes)):
        payloads.append(_further_piece(piece_key(key, index), first.header, get))
    payload = b"".join(payloads)
    if len(payload) != first.header.raw_bytes:
        raise _corrupt(key, f"{len(payload)} bytes in all, {first.header.raw_bytes} put")
    return Record(first.header, payload)


def _further_piece(at: bytes, header: Header, get: Callable[[bytes], bytes | None]) -> bytes:
    value = get(at)
    if value is None:
        raise _corrupt(at, "piece is missing")
    piece = decode(at, value)
    if piece.header != header:
        raise _corrupt(at, "piece of another put")
    return piece.payload


def _checksum(head: bytes, key: bytes, payload: bytes) -> int:
    hasher = xxhash.xxh3_64(head)
    hasher.update(key)
    hasher.update(payload)
    return hasher.intdigest()


def _corrupt(key: bytes, what: str) -> CorruptError:
    return CorruptError(f"record {key.hex()}: {what}", definite=True)
