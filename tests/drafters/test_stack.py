"""The kernels' stack computes what the modules compute, to the rounding of weights to 8 bits."""

from __future__ import annotations

import copy

import pytest
import torch

from dspark.drafters.block import BlockModel
from dspark.drafters.mtp import MtpModel
from dspark.drafters.stack import KernelDraftStack, ModuleStack, stack_for
from dspark.models.int8 import PackedLinear, quantise
from tests.drafters import tiny_drafters
from tests.tiny import target

S, T = 4, 40


def rounded(model: BlockModel | MtpModel) -> BlockModel | MtpModel:
    """The model with the layers' weights as 8 bits hold them."""
    model = copy.deepcopy(model)
    for module in model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            rows = torch.arange(module.out_features)
            module.weight.data = PackedLinear(quantise(module.weight.detach())).rows(rows)
    return model.requires_grad_(False)


@pytest.mark.parametrize("form", ["mtp", "vanilla", "dflash-masks"])
def test_both_stacks_agree(form: str) -> None:
    """After context, after blocks that left their own rows behind, and after a shorter text."""
    model = target(dtype="int8", num_slots=S, max_context=T)
    c = tiny_drafters.config(model, form)
    trained = rounded(tiny_drafters.model(c))
    kernels = stack_for(c, model, trained.layers, trained.rotary)
    modules = ModuleStack(c, model, trained.layers, trained.rotary)
    assert isinstance(kernels, KernelDraftStack)
    g = torch.Generator().manual_seed(0)
    width = c.hidden_size * (1 if form == "mtp" else c.num_features)
    with torch.inference_mode():
        for starts in ([0, 5, 17, 39], [3, 6, 22, 1], [9, 7, 30, 2]):
            slots = torch.arange(S).repeat_interleave(torch.tensor(starts))
            positions = torch.cat([torch.arange(n) for n in starts])
            rows = torch.randn(len(slots), width, generator=g)
            context = trained.context(rows) if isinstance(trained, BlockModel) else rows
            written = trained.keys_values(context, positions)
            for stack in (kernels, modules):
                stack.write(slots, positions, written)
            x = torch.randn(S, 1 if form == "mtp" else c.num_slots, c.hidden_size, generator=g)
            a, b = (s.run(x, [0, 1, 2, 3], starts) for s in (kernels, modules))
            # Activations are rounded to 8 bits in the kernels; a wrong key costs tens of percents.
            assert float((a - b).norm() / (b - x).norm()) < 0.04
            part = kernels.run(x[2:], [2, 3], starts[2:])
            assert torch.equal(part, a[2:])


def test_what_the_kernels_cannot_do_runs_in_modules() -> None:
    model = target(dtype="int8")
    for form, target_ in (("everything", model), ("vanilla", target())):
        c = tiny_drafters.config(target_, form)
        trained = tiny_drafters.model(c)
        assert isinstance(stack_for(c, target_, trained.layers, trained.rotary), ModuleStack)
