"""What a trained drafter looks like, as one frozen dataclass.

Two kinds: `block` (DFlash, DSpark: one parallel pass over a block, then an optional sequential
head) and `mtp` (DeepSeek's multi-token-prediction module: one decoder layer that predicts one token
ahead). `checkpoint.py` reads and writes the layouts in which such a configuration is stored.

Words: *context* is what the target computed over the tokens in front of the anchor; a *slot* of a
block is one position that predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import DecoderConfig, RopeConfig

Kind = Literal["block", "mtp"]
HeadType = Literal["vanilla", "gated", "rnn", "bilinear"]
HEAD_TYPES: tuple[HeadType, ...] = ("vanilla", "gated", "rnn", "bilinear")


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and switches of a drafter.

    block_size      drafts of one block (gamma); 1 for mtp, which repeats itself for more
    num_target_layers  of the target; 0 where a checkpoint does not say
    target_layer_ids  target layers whose outputs are the context (i: output of layer i)
    sample_from_anchor  the anchor's slot predicts, so gamma slots give gamma drafts; without it
                    (plain DFlash) the block is the anchor and gamma masks, and the masks predict
    markov_rank     0: no sequential stage, the DFlash form
    markov_head_type  vanilla (eq. 5), gated, rnn (eq. 6), or bilinear: gated by H(h_k) without
                    the sigmoid, the score of DFlash2's path selector
    """

    kind: Kind
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope: RopeConfig
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int = 1
    mask_token_id: int | None = None
    qk_norm: bool = True
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: HeadType = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = True
    # Options of this project, off in the layouts that other engines read.
    inject: bool = False
    """Feed the last context row and the anchor's embedding into every slot, besides attention."""
    conv: bool = False
    """Two-tap dynamic depthwise convolution in front of every sublayer (DFlash2)."""
    layer_fusion: bool = False
    """Every draft layer fuses the target layers on its own (DFlare)."""
    draft_vocab_size: int = 0
    """Tokens that can be drafted; 0 is the whole vocabulary."""
    candidates: int = 0
    """The sequential stage ranks this many best tokens of the base logits; 0 ranks all."""
    target: str = ""
    """Name of the target it was trained for."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "block_size"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: expected 1 up")
        for name in ("num_target_layers", "markov_rank", "candidates"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: expected 0 up")
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size={self.draft_vocab_size} is out of range: expected 0 (all) to"
                f" {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty: a drafter needs at least one")
        for layer in self.target_layer_ids:
            known = self.num_target_layers or layer + 1
            if not -1 <= layer < known:
                raise ConfigError(
                    f"target_layer_ids: {layer} is out of range: the target has layers 0 to"
                    f" {known - 1} (-1 is the embedding)"
                )
        if self.markov_head_type not in HEAD_TYPES:
            raise ConfigError(
                f"markov_head_type {self.markov_head_type!r} is unknown: expected one of"
                f" {', '.join(HEAD_TYPES)}"
            )
        if self.kind == "block":
            if self.mask_token_id is None:
                raise ConfigError("mask_token_id is missing: a block drafter needs one")
            if not 0 <= self.mask_token_id < self.vocab_size:
                raise ConfigError(
                    f"mask_token_id={self.mask_token_id} is outside the embedding, which has"
                    f" {self.vocab_size} rows"
                )
            if self.num_target_layers and self.num_target_layers - 1 in self.target_layer_ids:
                raise ConfigError(
                    f"target_layer_ids holds the final layer {self.num_target_layers - 1}: engines"
                    " disagree whether it is taken before or after the final norm; take another"
                )
        elif len(self.target_layer_ids) != 1 or self.num_layers != 1:
            raise ConfigError("an mtp drafter has one layer and reads one target layer")
        if self.confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ConfigError("confidence_head_with_markov needs markov_rank above 0")

    @property
    def num_slots(self) -> int:
        """Positions of a whole block: one more than drafts where the anchor does not predict."""
        return self.block_size + (not self.sample_from_anchor)

    @property
    def _deepest(self) -> int:
        return max(self.target_layer_ids) + (self.kind == "block")  # never the final layer

    @property
    def num_features(self) -> int:
        return len(self.target_layer_ids)

    def check_target(self, vocab_size: int, hidden_size: int, num_layers: int, name: str) -> None:
        """Raises CheckpointError if it was made for another target, saying in what they differ."""
        for what, mine, theirs in (
            ("vocab_size", self.vocab_size, vocab_size),
            ("hidden_size", self.hidden_size, hidden_size),
            # Unknown, it still has to reach what is read.
            ("num_target_layers", self.num_target_layers or max(num_layers, self._deepest + 1),
             num_layers),
        ):  # fmt: skip
            if mine != theirs:
                made = f" (it was trained for {self.target})" if self.target else ""
                raise CheckpointError(
                    f"{name} is a drafter for another target{made}: its {what} is {mine}, the"
                    f" target's is {theirs}"
                )


def like_target(
    target: DecoderConfig, kind: Kind, target_layer_ids: tuple[int, ...], num_layers: int
) -> dict[str, object]:
    """The fields that a drafter takes over from its target, for `DrafterConfig(**fields)`."""
    return {
        "kind": kind,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_layers": num_layers,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_context": target.max_context,
        "rms_norm_eps": target.rms_norm_eps,
        "rope": target.rope,
        "num_target_layers": target.num_layers,
        "target_layer_ids": target_layer_ids,
    }
