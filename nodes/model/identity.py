"""Which prompt row is which: the chain of identities, one per carried row.

An identity names a row's whole prefix: it is a cryptographic digest of its parent's identity and of
its own content, so equal identities mean equal prefixes and a store may share what it keeps under
them (non-cryptographic hashes can be made to collide: vLLM issue 54727). Every field is tagged and
framed by its length, so no two lists of fields give the same bytes (SGLang pull request 37058).
Does not own who keeps a block, nor any arithmetic of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from nodes.settings import ModelSettings

IDENTITY_BYTES = 32
_PERSON = b"cmnet-prefix-1"


class PromptRows(msgspec.Struct, frozen=True, eq=False):
    """The carried rows of one prompt, in order."""

    identities: list[bytes]
    """32 bytes per row; the last is the identity of the whole prompt."""

    seeds: npt.NDArray[np.uint64]
    """First 8 bytes of each identity, little-endian: what a row's seal starts from."""

    tokens_per_row: npt.NDArray[np.int64]
    """Tokens each row stands for; only the last may be partial."""

    block_keys: list[bytes]
    """Per prefix block the identity of its last row; only the last block may be partial."""

    full_blocks: int
    """Leading blocks that are complete; only these may be stored and shared."""


def field(tag: int, value: bytes) -> bytes:
    """One field of a digest's input: tag, length, value."""
    return bytes((tag,)) + len(value).to_bytes(4, "little") + value


def integer_field(tag: int, value: int) -> bytes:
    """One integer field, of any size and sign."""
    return field(tag, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def root(settings: ModelSettings) -> bytes:
    """The parent of every first row: what must be equal for stored rows to be usable at all."""
    layout = (settings.carried_layers, settings.tokens_per_carried, settings.block_tokens)
    return _digest(b"".join(integer_field(5 + i, value) for i, value in enumerate(layout)))


def prompt_rows(
    hash_ids: Sequence[int], *, input_tokens: int, settings: ModelSettings
) -> PromptRows:
    """The rows of a prompt of ``input_tokens`` whose blocks have these trace identities.

    Raises ValueError if the number of blocks does not fit the number of tokens. A trace without
    block identities passes ids that no other request has.
    """
    blocks = -(-input_tokens // settings.block_tokens)
    if input_tokens < 1 or len(hash_ids) != blocks:
        raise ValueError(
            f"expected {max(blocks, 1)} hash_ids for {input_tokens} tokens, at least 1"
        )
    lengths = _row_lengths(input_tokens, settings.tokens_per_carried)
    identities = _chain(hash_ids, lengths, settings)
    per_block = settings.rows_per_block
    joined = b"".join(identity[:8] for identity in identities)
    return PromptRows(
        identities=identities,
        seeds=np.frombuffer(joined, dtype="<u8").astype(np.uint64),
        tokens_per_row=np.array(lengths, dtype=np.int64),
        block_keys=[*identities[per_block - 1 : -1 : per_block], identities[-1]],
        full_blocks=input_tokens // settings.block_tokens,
    )


def _row_lengths(input_tokens: int, tokens_per_row: int) -> list[int]:
    full, rest = divmod(input_tokens, tokens_per_row)
    return [tokens_per_row] * full + ([rest] if rest else [])


def _chain(hash_ids: Sequence[int], lengths: list[int], settings: ModelSettings) -> list[bytes]:
    per_block = settings.rows_per_block
    parent, identities = root(settings), []
    for row, length in enumerate(lengths):
        block, index = divmod(row, per_block)
        own = integer_field(3, index) + integer_field(4, length)
        parent = _digest(field(1, parent) + integer_field(2, hash_ids[block]) + own)
        identities.append(parent)
    return identities


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=IDENTITY_BYTES, person=_PERSON).digest()
