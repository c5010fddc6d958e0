"""Frames of the RDMA plane: kinds and layouts.

Owns the bytes that both ends of a queue pair agree on. A queue pair is named by its initiator's device
and a number that never repeats there, also not after a restart.
"""

from __future__ import annotations

import struct

CHUNK, ACK, CONNECT, ACCEPT, READ, DATA, REFUSED = range(32, 39)
"""Kinds of frames. The RDMA plane's range is 32 to 47."""

CHUNK_HEAD = struct.Struct("<QQIIQQiQ")
"""queue pair, sequence number of the chunk, its index in its message, count of chunks, digest of its
piece, immediate, region (-1: none), offset."""
ACK_HEAD = struct.Struct("<QQ")
"""queue pair, sequence number up to which (exclusive) everything is here."""
CONNECT_HEAD = struct.Struct("<QQ")
"""new queue pair, the one that it follows (0: none)."""
NUMBER = struct.Struct("<Q")
"""queue pair."""
READ_HEAD = struct.Struct("<QQIQQI")
"""queue pair, read, region, offset, charged bytes, index of the first chunk that is wanted."""
DATA_HEAD = struct.Struct("<QQIIQ")
"""queue pair, read, index of the chunk, count of chunks, digest of its piece."""
REFUSED_HEAD = struct.Struct("<QQB")
"""queue pair, number of the read or sequence number of the message, what was refused."""

REFUSED_READ, REFUSED_WRITE = 0, 1
