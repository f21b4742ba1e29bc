"""What drafters share with their target, on another device than the target's.

A drafter takes the embedding, the output matrix and the arithmetic from its target. One that drafts
elsewhere gets copies of the two matrices there, once, and none of the target's layers. Integer
kernels run on a CPU only, so what an int8 target lends is fp32: its rows as they were rounded.

Drafts made elsewhere may differ from those made beside the target, by rounding; texts do not.

Shape suffixes: V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.target import Linear, Shared


def find_device(name: str) -> torch.device:
    """`cpu` or `cuda[:N]`, with its number. Raises ConfigError for another name and for a GPU that
    is not here."""
    form = f"unknown draft device {name!r}: expected cpu or cuda[:N]"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ConfigError(form) from e
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(form)
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
        raise ConfigError(f"there is no draft device {name!r} here: PyTorch sees {here}")
    return numbered(device)


def numbered(device: torch.device) -> torch.device:
    """`cuda` with the number that it stands for."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def lend(target: Decoder | DeepseekV4, device: torch.device) -> Shared:
    """What drafters share with `target`, on `device`; the target itself if that is its own."""
    if numbered(target.device) == device:
        return target
    return target.lend(device) if isinstance(target, DeepseekV4) else Lent(target, device)


class Lent:
    """The two matrices of a decoder."""

    def __init__(self, target: Decoder, device: torch.device) -> None:
        self.vocab_size, self.hidden_size = target.vocab_size, target.hidden_size
        self.num_slots, self.max_context = target.num_slots, target.max_context
        self.num_layers, self.device = target.num_layers, device
        embed_VD, head_VD = target.tables()
        self._embed_VD = embed_VD.to(device)
        self._head_VD = self._embed_VD if head_VD is embed_VD else head_VD.to(device)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embed_VD)

    def output_head(self, ids: Tensor | None = None) -> Linear:
        return self.linear(self._head_VD if ids is None else self._head_VD[ids.to(self.device)])

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        w = weight.to(self._head_VD)
        b = None if bias is None else bias.to(self._head_VD)
        return lambda x: F.linear(x.to(w.dtype), w, b)
