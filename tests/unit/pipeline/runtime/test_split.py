"""Models as layers, layers as stages, and what a layer costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeroexp.config.sections import ModelConfig
from zeroexp.errors import ModelError
from zeroexp.models.gpt import GPT
from zeroexp.pipeline.cut import cut
from zeroexp.pipeline.runtime.measure import layer_costs
from zeroexp.pipeline.runtime.split import layer_sizes, layers_of, split

GPT_SIZES = ModelConfig(vocab_size=11, dim=8, layers=2, heads=2, max_seq_len=4)


def test_stages_hold_the_models_own_parameters_under_its_names():
    model = GPT(GPT_SIZES)
    layers = layers_of(model)
    assert [name for name, _ in layers] == ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    where = cut(layer_sizes(layers), 2, [2, 3])
    first, second = (split(model, where, [s]) for s in (0, 1))
    mine = dict(model.named_parameters())
    both = {**first.names(), **second.names()}
    assert both.keys() == mine.keys() and all(both[n] is mine[n] for n in mine)
    assert list(first.tied) == list(second.tied) == ["embedding.weight"]
    assert first.tied["embedding.weight"] is second.tied["embedding.weight"]
    assert split(model, where, [0, 1]).tied == {}


class NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


class Leaves(NoLayers):
    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        return [("a", self.a)]


class SameName(NoLayers):
    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        return [("a", self.a), ("a", self.b)]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (NoLayers(), "NoLayers cannot be cut into stages"),
        (Leaves(), r"no layer of pipeline_layers\(\) holds b.weight, b.bias"),
        (SameName(), "layers share the name a"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model, words):
    with pytest.raises(ModelError, match=words):
        layers_of(model)


def test_a_cut_of_other_layers_and_an_empty_stage_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    where = cut(layer_sizes(layers_of(model)), 2)
    with pytest.raises(ModelError, match="the cut is one of 3 layers, Sequential has 2"):
        split(model[:2], where, [0])
    bad = type(where)((0, 1, 2), (1.0, 1.0))
    with pytest.raises(ModelError, match="stage 1 has no parameters"):
        split(model[:2], bad, [1])


class Slow(nn.Module):
    """Three matrix products in forward; its backward is left to autograd."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def test_costs_count_bytes_and_leave_everything_as_it_was():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Slow(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[0].weight.grad = torch.full((8, 6), 5.0)
    sample = torch.randn(10, 6)
    before = torch.get_rng_state()
    costs = layer_costs(layers_of(model), sample)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model[0].weight.grad, torch.full((8, 6), 5.0))
    assert model[2].inner[0].weight.grad is None
    assert [c.params for c in costs] == [56, 0, 192, 0, 18]
    assert [c.output for c in costs] == [320, 320, 320, 320, 80]
    # What each keeps in fp32: its input 10 x 6; the output of tanh; three inputs; dropout's mask
    # (bool) or its scaled noise, at most the output's size; its input.
    kept = [c.activations for c in costs]
    assert kept[:3] == [240, 320, 960] and kept[4] == 320 and 80 <= kept[3] <= 720
    assert all(c.forward > 0 and c.weight_grad >= 0 for c in costs)
    assert cut(costs, 2, "time").num_stages == 2
