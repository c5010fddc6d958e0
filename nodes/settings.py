"""The ``model:`` section of a topology: what is served, in charged and in carried sizes.

Owns the structure of the model as data and what is allowed in it. Does not own how long anything
takes (the cost model) nor how many bytes cross a socket (``--scale``, ``nodes/model/tiles.py``).
A wrong value raises FieldError naming the key and what would be right; the loader adds the file.
"""

from __future__ import annotations

import msgspec

from cmnet.topology.quantity import FieldError


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DeepSeek-R1 as the machine charges it, and the small part of it that is really carried."""

    layers: int = 61
    """Transformer layers; published: DeepSeek-V3 report, section 4.2."""

    moe_layers: int = 58
    """Layers with routed experts: all but the first three; published: same section."""

    dense_layers: int = 3
    """Layers without experts; charged in time only, never carried; published: same section."""

    carried_layers: int = 2
    """MoE layers whose messages really move. A change changes the model, so reports print it."""

    tokens_per_carried: int = 128
    """Prompt tokens that one carried row stands for (model.md section 6): the paper's KV page."""

    block_tokens: int = 512
    """Tokens of one prefix block: the grain of Mooncake's trace (``hash_ids``)."""

    max_tokens: int = 131_072
    """Prompt and output of one request together: the context of DeepSeek-R1 (128 Ki)."""

    hidden: int = 7168
    """Width of a token vector; published: DeepSeek-V3 report, section 4.2."""

    routed_experts: int = 256
    """Experts that the gate chooses from; published: same section."""

    shared_experts: int = 1
    """Experts that every token visits; must be 1, as carried; published: same section."""

    groups: int = 8
    """Groups of routed experts, equal in size, neighbours by id; published: same section."""

    top_groups: int = 4
    """Groups that one token may use; published: same section (node-limited routing)."""

    top_k: int = 8
    """Routed experts of one token; published: same section."""

    vocabulary: int = 129_280
    """Tokens that the sampler chooses from; published: DeepSeek-V3 configuration."""

    kv_bytes_per_token: int = 70_272
    """Charged KV bytes of a token: 61 layers x (512 latent + 64 rope) x 2 B BF16; derived."""

    dispatch_bytes: int = 7680
    """Charged bytes of a token sent to one expert: 7,168 INT8 and a 512 B slot for the scale,
    CloudMatrix384 paper, section 4.2.1."""

    combine_bytes: int = 14_336
    """Charged bytes of one expert's result: 7,168 BF16, CloudMatrix384 paper, section 4.2.1."""

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            low = 0 if key == "dense_layers" else 1
            expected = f"{low} to 2^31 - 1"
            _require(key, expected, holds=low <= getattr(self, key) < 2**31)
        self._check_layers()
        self._check_prompt()
        self._check_gate()

    def _check_layers(self) -> None:
        total = self.moe_layers + self.dense_layers
        _require("layers", f"moe_layers + dense_layers = {total}", holds=self.layers == total)
        expected = f"1 to moe_layers = {self.moe_layers}"
        _require("carried_layers", expected, holds=self.carried_layers <= self.moe_layers)

    def _check_prompt(self) -> None:
        expected = f"a divisor of block_tokens = {self.block_tokens}"
        divides = self.block_tokens % self.tokens_per_carried == 0
        _require("tokens_per_carried", expected, holds=divides)
        expected = f"1 to max_tokens = {self.max_tokens}"
        _require("block_tokens", expected, holds=self.block_tokens <= self.max_tokens)

    def _check_gate(self) -> None:
        _require("routed_experts", "1 to 4096", holds=self.routed_experts <= 4096)
        expected = f"a divisor of routed_experts = {self.routed_experts}"
        _require("groups", expected, holds=self.routed_experts % self.groups == 0)
        expected = f"1 to groups = {self.groups}"
        _require("top_groups", expected, holds=self.top_groups <= self.groups)
        most = min(64, self.routed_experts // self.groups * self.top_groups)
        _require("top_k", f"1 to {most}", holds=self.top_k <= most)
        _require("shared_experts", "1", holds=self.shared_experts == 1)

    @property
    def rows_per_block(self) -> int:
        """Carried rows of a full prefix block."""
        return self.block_tokens // self.tokens_per_carried

    @property
    def shared_expert(self) -> int:
        """The id of the shared expert: the one after the routed ones."""
        return self.routed_experts


def _require(key: str, expected: str, *, holds: bool) -> None:
    if not holds:
        raise FieldError(key, expected)
