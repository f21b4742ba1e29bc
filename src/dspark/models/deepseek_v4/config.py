"""What a DeepSeek-V4 looks like, as one frozen dataclass.

The kind of a layer follows from one number, as in the official configuration (`compress_ratios`):

    0      sliding window only
    4      CSA: windows of four tokens, each pooled together with the window before it into one
           entry, of which an indexer chooses the best for each query
    other  HCA: windows of that many tokens (128 in the published models), all entries visible
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.errors import CheckpointError
from dspark.models.config import RopeConfig

CSA_RATIO = 4
MAX_STREAMS = 8
"""As in glue.c, which keeps a token's gates on the stack."""


@dataclass(frozen=True)
class V4Config:
    """Sizes and switches. Names in brackets are those of the official `config.json`."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    """The last dimensions of a head, which rotate [qk_rope_head_dim]."""
    q_rank: int
    """[q_lora_rank]"""
    o_groups: int
    o_rank: int
    """[o_lora_rank]"""
    window: int
    """Tokens that every layer sees exactly, the query's own included [sliding_window]."""
    ratios: tuple[int, ...]
    """One for each layer of the tower, without the tail for drafters [compress_ratios]."""
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    """Inner size of an expert, routed or shared [moe_intermediate_size]."""
    num_hash_layers: int
    """The first layers choose experts by token id, the others by score."""
    routed_scale: float
    swiglu_limit: float
    streams: int
    """Parallel residual streams [hc_mult]."""
    sinkhorn_iterations: int
    hc_eps: float
    norm_eps: float
    max_context: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Of layers with ratio 0."""
    compress_rope: RopeConfig = field(default_factory=lambda: RopeConfig(theta=160_000.0))
    """Of all others: for queries, window, entries and indexer alike. V4 multiplies no factor into
    cosine and sine: with yarn, `attention_factor` is 1."""

    def __post_init__(self) -> None:
        for what, whole, part in (
            ("heads among o_groups", self.num_heads, self.o_groups),
            ("head dimensions that rotate into pairs", self.rope_dim, 2),
            ("dimensions of a head into pairs", self.head_dim, 2),
            ("dimensions of an index head into pairs", self.index_dim, 2),
        ):
            if part < 1 or whole < 1 or whole % part:
                raise CheckpointError(f"DeepSeek-V4: {whole} {what} ({part}) do not divide evenly")
        if self.rope_dim > min(self.head_dim, self.index_dim):
            raise CheckpointError(
                f"DeepSeek-V4: {self.rope_dim} rotating dimensions do not fit a head of"
                f" {self.head_dim} and an index head of {self.index_dim}"
            )
        if not 1 <= self.streams <= MAX_STREAMS:
            raise CheckpointError(
                f"DeepSeek-V4: {self.streams} residual streams, expected 1 to {MAX_STREAMS}"
            )
        if self.experts_per_token > self.num_experts:
            raise CheckpointError(
                f"DeepSeek-V4: {self.experts_per_token} experts a token of {self.num_experts}"
            )
        if not self.ratios or min(self.ratios) < 0:
            raise CheckpointError(f"DeepSeek-V4: impossible compress_ratios {self.ratios}")

    @property
    def num_layers(self) -> int:
        return len(self.ratios)


def span(ratio: int) -> int:
    """Tokens that flow into one compressed entry: CSA windows overlap."""
    return 2 * ratio if ratio == CSA_RATIO else ratio
