"""Weights, tables and constants of the exact body, and their one definition.

Everything is a function of names, so that any other code can make it again:

    bytes(name, n)   the first n bytes of Philox(key=k).random_raw(), each word little-endian, where
                     k = blake2b("cmnet exact <name>", 16 bytes), little-endian
    signed(m)        byte % (2 m + 1) - m: integers in -m..m (m = 127 or 15)
    nonzero          byte % 254 - 127, and 0..126 moved up by one: -127..127 without 0
    word(name, i)    blake2b("cmnet exact <name> <i>", 8 bytes), little-endian
    odd(name, n)     n words of bytes(name, 8 n), little-endian, lowest bit set

A name of layer l is "<name> l": query [64, 256], latent [64, 20], key up [4, 16, 32], value up
[16, 4, 32], out [128, 64], gate [64, experts], first [experts + 1, 64, 32], second [experts + 1, 16,
64] (the shared expert last), check [64] (nonzero); words row, place (odd), attention, combine, check
odd; odd folds numerator [640], denominator, bound [32], out, combine [64]; expert words (odd).
The MTP layer has all of these with "mtp" for l, and beside them merge [128, 64], the word merge and the
odd fold merge [64]. Names without a layer: embedding [512, 64], head [64, 512], words start prompt,
start token, start place (odd), sample, and embedding word 0..7. The two "up" matrices are signed(15),
all others signed(127). Columns of one head's parts are component-major: column j * 32 + head.

Tables (integers, from ``math``, checked by digest): cos and sin of 2 pi i / 4096 times 2^14;
65535 / (1 + exp(-i / 256)) for i = -2048..2047; 1024 exp(i / 128) for i = -512..511; all rounded.
Gain of a norm at i: 1 + i / 512; scale of channel c: 1 + (c mod 64) / 512. Formulas that use them:
model.md section 2. Does not own the steps. ``exact_oracle.py`` makes all of this in its own code.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
import numpy as np
import numpy.typing as npt

from cmnet import errors
from nodes.model.body import I64, U64
from nodes.settings import ModelSettings

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]
I16 = npt.NDArray[np.int16]
U32 = npt.NDArray[np.uint32]

TABLES_DIGEST = "f509cebeac99672dbd1d9600cb3ac6a9"
"""Of the four tables: no libm in use gives others: an entry is at least 3e-5 from a tie, but
for the sigmoid of 0, which is one exactly (model.md R4)."""


class ExactDimensions(msgspec.Struct, frozen=True, kw_only=True):
    """Carried sizes: DeepSeek-R1's structure in small (model.md section 1). Fixed, not settings."""

    hidden: int = 64
    """R1: 7,168 = 112 x 64, so that ``--scale full`` carries 112 tiles."""
    heads: int = 32
    """R1: 128."""
    nope: int = 4
    """Of a head's query, without position; R1: 128."""
    rope: int = 4
    """Of a head's query, rotated by its position; R1: 64."""
    value: int = 4
    """R1: 128."""
    latent: int = 16
    """Of a KV row, beside the rotated key; R1: 512."""
    inner: int = 16
    """Of an expert; R1: 2,048."""
    vocabulary: int = 512
    """R1: 129,280."""


DIMENSIONS = ExactDimensions()
HIDDEN, HEADS = DIMENSIONS.hidden, DIMENSIONS.heads
NOPE, ROPE, VALUE = DIMENSIONS.nope, DIMENSIONS.rope, DIMENSIONS.value
LATENT, INNER, VOCABULARY = DIMENSIONS.latent, DIMENSIONS.inner, DIMENSIONS.vocabulary
ROW_VALUES = LATENT + ROPE
"""Bytes of a KV row beside its bound seal."""
SUM_WORDS = ROW_VALUES * HEADS + HEADS + 1
"""Of a read: numerators [20, 32], denominators [32], the fold of bound seals."""
PLACE, SEAL = HIDDEN, HIDDEN + 1
"""Columns of a state behind its values."""
STATE_WORDS = HIDDEN + 2

LIMIT = float(2**20)
"""Of a state's values."""
QUERY_LIMIT = 31.0
QUERY_SCALE = 0.0105
"""Root mean square of queries about 7: exponents 1.6 nats wide (model.md 2.2)."""
KEY_SCALE = 0.07
LATENT_RMS = 40.0
ROPE_STEPS = (163, 7)
"""Angle index of a pair = place x step mod 4096 (model.md 2.3)."""
ANGLES = 4096
OUT_SCALE = 1.35e-3
"""Attention moves a state by about 0.25 of it (model.md 2.6); measured at 100 rows."""
EXPERT_SCALE = 0.0088
"""The experts move a state by about 0.5 of it."""
GATE_SCALE, GATE_SHIFT = 0.64, 768.0
"""1.5 nats wide, centred at -3 nats, 256 steps a nat (model.md 2.7)."""
GATE_SUM = 10_240
"""Of a token's weights: R1's 2.5 in units of 1/4096."""
SHARED_WEIGHT = 4096
HEAD_SCALE = 0.105
"""Logits about 0.5 nat wide, 128 steps a nat: sum of p^2 about 0.0025, the chance that a wrong seal
gives the same token (model.md has 0.005 at 1 nat: then 2 of 100 faults often stay unseen)."""
MERGE_SCALE = 5.5
"""The MTP layer begins with values as large as a start's: 64 x 73 in the root mean square."""
EMBEDDING_SCALE = 64
SCORE_SCALE, SCORE_SHIFT, SCORE_LEAST = 2.0**-18, 0.85, 0.70
"""exp(z) as y^16, y = score 2^-18 + 0.85 within 0.70..1 (model.md 2.5)."""
ONE_BITS = 0x3F800000
"""float32 1.0: true scales are below 0.08; what a flipped bit makes of one is taken as 0."""
KEYS_A_BLOCK = 512
"""Keys summed in float32: 255 x 128 x 512 < 2^24."""
DRAW_BITS = 36
"""Of the sampler's draw: total < 2^25, so that the product is below 2^61."""


MTP = "mtp"
"""The name of the MTP layer, where carried layers have their index."""


class Layer(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One carried layer, or the MTP layer. Weights are small integers in float32."""

    query: F32
    latent: F32
    key_up: F32
    value_up: F32
    out: F32
    gate: F32
    first: F32
    second: F32
    check: I64
    bias: I64
    """Per routed expert, added to scores for the choice only."""
    row: int
    place: int
    attention: int
    combine: int
    check_odd: int
    fold_numerator: U64
    fold_denominator: U64
    fold_bound: U64
    fold_out: U64
    fold_combine: U64
    expert: U64


class Model(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """All weights, tables and constants."""

    settings: ModelSettings
    layers: list[Layer]
    """The carried ones, and behind them the MTP layer."""
    merge: F32
    merge_word: int
    fold_merge: U64
    embedding: I64
    head: F32
    cos: I64
    sin: I64
    sigmoid: I64
    exp: I64
    gain: F64
    channel: F64
    start_prompt: int
    start_token: int
    start_place: int
    sample: int
    embedding_words: U64


def word(name: str, index: int | str = 0) -> int:
    """``word(name, i)`` of the definition."""
    data = f"cmnet exact {name} {index}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def raw(name: str, count: int) -> npt.NDArray[np.uint8]:
    """``bytes(name, n)`` of the definition."""
    key = hashlib.blake2b(f"cmnet exact {name}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-count // 8))
    return words.astype("<u8").view(np.uint8)[:count]


def signed(name: str, *shape: int, limit: int = 127) -> F32:
    """``signed(m)`` of the definition."""
    values = raw(name, math.prod(shape)).astype(np.int64) % (2 * limit + 1) - limit
    return values.astype(np.float32).reshape(shape)


def odd(name: str, count: int) -> U64:
    """``odd(name, n)`` of the definition."""
    return raw(name, 8 * count).view("<u8").astype(np.uint64) | np.uint64(1)


def layer_names(settings: ModelSettings) -> list[int | str]:
    """What stands for l in the names of the definition, layer by layer."""
    return [*range(settings.carried_layers), MTP]


def _layer(index: int | str, experts: int, bias: I64) -> Layer:
    check = raw(f"check {index}", HIDDEN).astype(np.int64) % 254 - 127
    return Layer(
        query=signed(f"query {index}", HIDDEN, (NOPE + ROPE) * HEADS),
        latent=signed(f"latent {index}", HIDDEN, ROW_VALUES),
        key_up=signed(f"key up {index}", NOPE, LATENT, HEADS, limit=15),
        value_up=signed(f"value up {index}", LATENT, VALUE, HEADS, limit=15),
        out=signed(f"out {index}", VALUE * HEADS, HIDDEN),
        gate=signed(f"gate {index}", HIDDEN, experts),
        first=signed(f"first {index}", experts + 1, HIDDEN, 2 * INNER),
        second=signed(f"second {index}", experts + 1, INNER, HIDDEN),
        check=check + (check >= 0),
        bias=bias,
        row=word("row", index),
        place=word("place", index) | 1,
        attention=word("attention", index),
        combine=word("combine", index),
        check_odd=word("check odd", index) | 1,
        fold_numerator=odd(f"numerator {index}", ROW_VALUES * HEADS),
        fold_denominator=odd(f"denominator {index}", HEADS),
        fold_bound=odd(f"bound {index}", HEADS),
        fold_out=odd(f"fold out {index}", HIDDEN),
        fold_combine=odd(f"fold combine {index}", HIDDEN),
        expert=odd(f"expert {index}", experts + 1),
    )


def sigmoid_table() -> I64:
    """65535 times the sigmoid, 256 steps a nat, of -2048..2047."""
    return _integers([65535 / (1 + math.exp(-i / 256)) for i in range(-2048, 2048)])


def exp_table() -> I64:
    """1024 times the exponential, 128 steps a nat, of -512..511."""
    return _integers([1024 * math.exp(i / 128) for i in range(-512, 512)])


def angle_tables() -> tuple[I64, I64]:
    """2^14 times cos and sin of every angle."""
    angles = [2 * math.pi * i / ANGLES for i in range(ANGLES)]
    return (
        _integers([2**14 * math.cos(angle) for angle in angles]),
        _integers([2**14 * math.sin(angle) for angle in angles]),
    )


def _integers(values: list[float]) -> I64:
    return np.array([round(value) for value in values], dtype=np.int64)


def model(settings: ModelSettings, biases: list[I64]) -> Model:
    """The model of these settings, with one bias vector a layer, the MTP layer's last.

    RunError: the tables differ here.
    """
    cos, sin = angle_tables()
    tables = cos, sin, sigmoid_table(), exp_table()
    found = digest(*tables)
    if found != TABLES_DIGEST:
        raise errors.RunError(f"tables {found} of this machine's libm differ from {TABLES_DIGEST}")
    experts = settings.routed_experts
    steps = np.arange(HIDDEN, dtype=np.float64)
    return Model(
        settings=settings,
        layers=[
            _layer(name, experts, bias)
            for name, bias in zip(layer_names(settings), biases, strict=True)
        ],
        merge=signed(f"merge {MTP}", 2 * HIDDEN, HIDDEN),
        merge_word=word("merge", MTP),
        fold_merge=odd(f"fold merge {MTP}", HIDDEN),
        embedding=signed("embedding", VOCABULARY, HIDDEN).astype(np.int64),
        head=signed("head", HIDDEN, VOCABULARY),
        cos=cos,
        sin=sin,
        sigmoid=tables[2],
        exp=tables[3],
        gain=1 + steps / 512,
        channel=1 + steps / 512,
        start_prompt=word("start prompt"),
        start_token=word("start token"),
        start_place=word("start place") | 1,
        sample=word("sample"),
        embedding_words=np.array([word("embedding word", i) for i in range(8)], dtype=np.uint64),
    )


def digest(*arrays: npt.NDArray[np.generic]) -> str:
    """Digest of arrays' bytes, little-endian on any machine."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    return found.hexdigest()
