"""What the serving code may ask of a model's body, whichever body it is.

Owns the interface only. The seal-only body (``nodes/model/seal.py``) is one; the exact body of
small integers is to be another. The law of every body: the result for a row depends on that row
and on what it attends to, never on how work was split (batch, sequence pieces, chunks, experts,
order of arrival); sums over several terms are exact, so the bits are equal.

Arrays of *states*, *rows*, *vectors*, *results* and *sums* are opaque: the first axis counts tokens
(or messages), index and concatenate along it, change nothing else. ``layer`` counts carried layers
from 0; ``settings.carried_layers`` is the MTP layer, taken by every step that has a layer. ``place`` is
the index of a row in its sequence: prompt rows first, then one row for each token that was generated
and fed back. Nobody writes into an array that he was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from nodes.settings import ModelSettings

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class Gate(msgspec.Struct, frozen=True, eq=False):
    """Where tokens go: ``experts`` and ``weights``, both [tokens, top_k], slot by slot."""

    experts: I64
    weights: U64


class Prefilled(msgspec.Struct, frozen=True, eq=False):
    """What a run over prompt rows leaves behind."""

    rows: Array
    """KV rows [carried_layers, rows] of the rows that were computed now."""

    states: Array
    """States after the last layer [rows]; the last row's gives the first token."""


class Body(Protocol):
    """The model of one run; all processes make it from the same settings."""

    settings: ModelSettings
    name: str
    fingerprint: str
    draft_fingerprint: str
    """Of the MTP layer too; the main model and its fingerprint do not depend on it."""
    vector_words: int
    result_words: int
    row_bytes: int

    def start_prompt(self, seeds: U64, *, first_place: int) -> Array:
        """States [n] of neighbouring prompt rows, of which the first is at ``first_place``."""

    def start_tokens(self, tokens: I64, *, places: I64) -> Array:
        """States [n] of generated tokens that are fed back, each at its place."""

    def mtp_start(self, states: Array, tokens: I64) -> Array:
        """States [n] that begin the MTP layer: of states after the last carried layer, and of the
        tokens [n] that were sampled from them. They keep their places. What is sampled after the
        layer is the draft of the token after next.

        The layer's KV rows are a sequence of their own. It begins with the first token that was
        generated and fed back, at its place in the main sequence: prompt rows do not go through the
        MTP layer, so nothing of it is stored or moved from prefill to decode.
        """

    def kv_rows(self, states: Array, *, layer: int) -> Array:
        """KV rows [n] that these tokens leave for those after them. Made before ``attend``."""

    def rows_from_bytes(self, data: bytes | bytearray | memoryview) -> Array:
        """KV rows (or final states) from their ``tobytes()``. CorruptError on a wrong length."""

    def read(self, states: Array, rows: Array, *, layer: int, first_place: int) -> Array:
        """Sums [n]: what each state takes from all these neighbouring rows of its sequence.

        Sums of pieces of a sequence add with ``+``, in any order. Own rows are read too.
        """

    def read_causal(self, states: Array, rows: Array, *, layer: int, first_place: int) -> Array:
        """Sums [n]: as ``read``, for the states of these very rows: each up to its own row."""

    def attend(self, states: Array, sums: Array, *, layer: int) -> Array:
        """States [n] after attention."""

    def gate(self, states: Array, *, layer: int) -> Gate:
        """The experts of each state after attention."""

    def dispatch(self, states: Array) -> U64:
        """Vectors [n, vector_words]: what goes to each expert of a token, and to the shared one."""

    def expert(self, experts: I64, vectors: U64, *, layer: int) -> U64:
        """Results [n, result_words] of vectors [n, vector_words] at their experts [n].

        The shared expert has the id ``settings.shared_expert``.
        """

    def combine(
        self, states: Array, weights: U64, results: U64, shared: U64, *, layer: int
    ) -> Array:
        """States [n] after the experts: results [n, top_k, result_words], slots as in the gate."""

    def moe_here(self, states: Array, *, layer: int) -> Array:
        """States [n] after gate, experts and combine, all of it in this process."""

    def prefill(self, seeds: U64, *, cached_rows: Array) -> Prefilled:
        """All layers of neighbouring prompt rows behind cached ones [carried_layers, cached]."""

    def sample(self, states: Array) -> I64:
        """The next token [n] of each state after the last layer."""

    def seals(self, states: Array) -> U64:
        """The seals [n] that are returned with the tokens and compared with the oracle's."""

    def fold_prompt(self, states: Array, *, first_place: int) -> int:
        """This piece's share of the receipt, states of the last layer; shares add mod 2^64.

        Also folds the states after the MTP layer, with a token's index in the answer as its place.
        """

    def receipt(self, last: int, shares: Sequence[int]) -> int:
        """The receipt of a request: its last token's seal and all shares of its prompt."""
