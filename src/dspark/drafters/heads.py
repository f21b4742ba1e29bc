"""The sequential stage: a light head that knows which tokens were already drawn (paper, 3.1).

The parallel stage gives base logits U_k. A sequential head adds a bias that depends on the tokens
drawn before (eq. 4), always as a low-rank latent times one shared matrix:

    p_k(. | x_0, x_<k) = softmax(U_k + z_k W2),     z_k [r] from W1[x_{k-1}] and perhaps more

    vanilla   z = W1[x_{k-1}]                                             (eq. 5)
    gated     z = W1[x_{k-1}] * sigmoid(W_gate [h_k ; W1[x_{k-1}]] + b)
    rnn       z = tanh(W_o u), s_k = g s_{k-1} + (1 - g) tanh(W_c u)      (eq. 6)
              u = [s_{k-1} ; W1[x_{k-1}] ; h_k], g = sigmoid(W_g u), s_0 = 0
    bilinear  z = W1[x_{k-1}] * (W_h h_k), the path selector's score of DFlash2

so that q stays an exact softmax, a vocabulary can be restricted by choosing columns of W2, and a
step costs r times the candidates. The confidence head (eq. 7) reads h_k and W1[x_{k-1}], never
x_k: what decides whether a draft is verified must not depend on that draft.

Shape suffixes: B blocks, K slots, D hidden size, r rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig


class MarkovHead(nn.Module):
    """Vanilla form; the others derive from it. `w2` holds V rows of r: z W2 = z @ w2.T."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.rank = c.markov_rank
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = nn.Linear(c.markov_rank, c.vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=1.0)
        nn.init.zeros_(self.markov_w2.weight)  # no bias at first: the base logits' own softmax

    def embed(self, previous: Tensor) -> Tensor:
        """[...] token ids -> W1 rows [..., r]."""
        return self.markov_w1(previous)  # type: ignore[no-any-return]

    def step(
        self, e_Br: Tensor, h_BD: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One slot: W1 rows of the tokens before it, its hidden states -> latent z, next state."""
        return e_Br, state

    def latents(self, e_BKr: Tensor, h_BKD: Tensor) -> Tensor:
        """All slots at once, the tokens before each being known (training): [B, K, r]."""
        return self.step(e_BKr, h_BKD, None)[0]


class GatedHead(MarkovHead):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__(c)
        self.gate_proj = nn.Linear(c.hidden_size + c.markov_rank, c.markov_rank)

    def step(
        self, e_Br: Tensor, h_BD: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return e_Br * torch.sigmoid(self.gate_proj(torch.cat([h_BD, e_Br], -1))), state


class BilinearHead(MarkovHead):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__(c)
        self.hidden_proj = nn.Linear(c.hidden_size, c.markov_rank)
        nn.init.ones_(self.hidden_proj.bias)  # begins near the vanilla form

    def step(
        self, e_Br: Tensor, h_BD: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return e_Br * self.hidden_proj(h_BD), state


class RnnHead(MarkovHead):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__(c)
        self.joint_proj = nn.Linear(2 * c.markov_rank + c.hidden_size, 3 * c.markov_rank)

    def step(
        self, e_Br: Tensor, h_BD: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        s = torch.zeros_like(e_Br) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([s, e_Br, h_BD], -1)).chunk(3, -1)
        g = torch.sigmoid(gate)
        return torch.tanh(output), g * s + (1 - g) * torch.tanh(candidate)

    def latents(self, e_BKr: Tensor, h_BKD: Tensor) -> Tensor:
        state, out = None, []
        for e_Br, h_BD in zip(e_BKr.unbind(1), h_BKD.unbind(1), strict=True):
            z_Br, state = self.step(e_Br, h_BD, state)
            out.append(z_Br)
        return torch.stack(out, 1)


def markov_head(c: DrafterConfig) -> MarkovHead | None:
    """The head that a configuration asks for; None for the DFlash form."""
    kinds = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RnnHead, "bilinear": BilinearHead}
    return kinds[c.markov_head_type](c) if c.markov_rank else None


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w [h_k ; W1[x_{k-1}]] + b), before the sigmoid."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = c.confidence_head_with_markov
        self.proj = nn.Linear(c.hidden_size + (c.markov_rank if self.with_markov else 0), 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, h: Tensor, e: Tensor | None) -> Tensor:
        """h [..., D], W1 rows [..., r] of the tokens before -> logits [...]."""
        if self.with_markov:
            assert e is not None
            h = torch.cat([h, e.to(h.dtype)], -1)
        return self.proj(h)[..., 0]  # type: ignore[no-any-return]
