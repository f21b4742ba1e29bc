"""What a target lends to drafters elsewhere computes what the target's own does. A second device is
not here, so the CPU lends to itself."""

from __future__ import annotations

import pytest
import torch

from dspark.errors import ConfigError
from dspark.models.deepseek_v4.model import DeepseekV4
from dspark.models.elsewhere import Lent, find_device, lend, numbered
from tests.drafters import tiny_v4
from tests.tiny import oracle, target

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_the_matrices_of_a_decoder(dtype: str, tied: bool) -> None:
    made = target(oracle("llama", tie_word_embeddings=tied), dtype=dtype)
    lent = Lent(made, CPU)
    assert (lent._head_VD is lent._embed_VD) == tied
    ids = torch.tensor([3, 250, 0])
    x = made.embed(ids)
    assert torch.equal(lent.embed(ids), x)
    for rows in (None, torch.tensor([1, 5, 256])):
        wanted, found = made.output_head(rows)(x), lent.output_head(rows)(x)
        # The integer kernels round activations to 8 bits.
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.05 if dtype == "int8" else 0)
    weight, bias = torch.randn(8, 64), torch.randn(8)
    assert lent.linear(weight, bias)(x).shape == (3, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_tower_without_its_layers(dtype: torch.dtype) -> None:
    sizes = {} if dtype == torch.float32 else {"hidden_size": 64}
    made = tiny_v4.target(tiny_v4.MTP, tiny_v4.config(**sizes), dtype=dtype)
    lent = made.lend(CPU)
    assert isinstance(lent, DeepseekV4) and not lent.layers and made.layers
    assert not lent.maths.integer and lent.maths.dtype == torch.float32
    ids = torch.tensor([3, 9])
    x = made.embed(ids)
    assert torch.equal(lent.embed(ids), x)
    atol = 0 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(lent.output_head()(x), made.output_head()(x), rtol=0, atol=atol)


def test_a_target_lends_itself_where_it_is() -> None:
    made = target()
    assert lend(made, find_device("cpu")) is made


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for one is told what is."""
    for name in ("toaster", "meta", "mps", "cuda:x"):
        with pytest.raises(ConfigError, match=f"unknown draft device '{name}': expected cpu or"):
            find_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no draft device 'cuda' here: PyTorch sees cpu$"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ConfigError, match=r"'cuda:2' here: PyTorch sees cpu, cuda:0, cuda:1$"):
        find_device("cuda:2")
    assert find_device("cuda") == numbered(torch.device("cuda")) == torch.device("cuda:1")
    assert find_device("cuda:0") == torch.device("cuda:0")
