"""The adapter of decoders on one made by hand: what it takes, what it refuses, what it makes anew.
Decoders of transformers are in tests/ranks/test_pipe_llama.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroexp.errors import ModelError
from zeroexp.models.decoder import as_pipeline
from zeroexp.pipeline.runtime import layers_of


class Layer(nn.Module):
    """Mixes along the sequence by a mask; ``width`` is read by the backbone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.mix = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return hidden_states + scale * torch.tanh(mask @ self.mix(hidden_states))


class Backbone(nn.Module):
    """Every layer has a mask of its own width, as sliding windows do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Layer(2), Layer(5), Layer(3)])
        self.norm = nn.LayerNorm(8)
        self.runs = [0]

    def masks(self, length: int, attention_mask: Tensor | None, like: Tensor) -> list[Tensor]:
        self.runs[0] += 1
        distance = torch.arange(length)[:, None] - torch.arange(length)
        kept = 1 if attention_mask is None else attention_mask[:, None, :]
        return [
            ((distance >= 0) & (distance < layer.width)).to(like.dtype) * kept
            for layer in self.layers
        ]

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        assert not use_cache
        x = self.embed_tokens(input_ids) * 3 if inputs_embeds is None else inputs_embeds
        masks = self.masks(x.shape[1], attention_mask, x)
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, mask, scale=0.5)
        return self.norm(x)


class Decoder(nn.Module):
    """Its logits are bounded, which no layer does."""

    def __init__(self, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.model = Backbone() if backbone is None else backbone
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, return_dict: bool, **keys: Any) -> Any:
        assert return_dict
        return SimpleNamespace(logits=torch.tanh(self.lm_head(self.model(**keys))))


def chain(layers: list[tuple[str, nn.Module]], value: Any) -> Any:
    for _, layer in layers:
        value = layer(value)
    return value


TOKENS = torch.arange(10).view(2, 5)
PADDING = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])


@pytest.mark.parametrize("padded", [False, True])
def test_layers_are_the_decoders_forward(padded: bool) -> None:
    decoder = Decoder()
    model = as_pipeline(decoder)
    batch = {"input_ids": TOKENS, "attention_mask": PADDING if padded else None}
    wanted = decoder(return_dict=True, use_cache=False, **batch).logits
    assert torch.equal(model(batch), wanted)
    assert torch.equal(chain(layers_of(model), batch), wanted)
    assert [name for name, _ in layers_of(model)] == [
        *("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head")
    ]
    alone = chain(layers_of(model), TOKENS)
    assert torch.equal(alone, wanted) is not padded
    assert torch.equal(alone, model(TOKENS))


def test_it_is_the_decoder_under_its_names() -> None:
    decoder = Decoder()
    decoder.lm_head.weight = decoder.model.embed_tokens.weight
    model = as_pipeline(decoder)
    ours, theirs = dict(model.named_parameters()), dict(decoder.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[n] is theirs[n] for n in theirs)
    assert model.state_dict().keys() == decoder.state_dict().keys()
    model.eval()
    assert not any(m.training for m in decoder.modules())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.decoder.model.norm.weight.zero_()
    assert not twin(TOKENS).any() and model(TOKENS).any()
    held = [p for _, layer in layers_of(model) for p in layer.parameters()]
    assert sum(p is decoder.lm_head.weight for p in held) == 2, "tied by being the same parameter"


def test_what_layers_are_given_is_made_once_a_batch_and_anew_where_it_changes() -> None:
    decoder = Decoder()
    layers = layers_of(as_pipeline(decoder))
    runs, mask = decoder.model.runs, PADDING.clone()
    made = runs[0]
    first = chain(layers[:-1], {"input_ids": TOKENS, "attention_mask": mask})
    assert runs[0] == made + 1  # for all layers of the batch
    mask[0, 1] = 0
    second = chain(layers[:-1], {"input_ids": TOKENS, "attention_mask": mask})
    assert not torch.equal(first, second)
    x = torch.randn(2, 5, 8)
    made = runs[0]
    for batch in (x, x + 1):  # a stage that has no embedding
        chain(layers[2:3], batch)
    assert runs[0] == made + 1
    chain(layers[2:3], x[:, :4])
    assert runs[0] == made + 2


def test_nothing_made_in_inference_mode_is_trained_with() -> None:
    layers = layers_of(as_pipeline(Decoder()))[1:4]
    x = torch.randn(2, 5, 8)
    with torch.inference_mode():
        chain(layers, {"hidden_states": x, "attention_mask": PADDING})
        chain(layers, x)
    chain(layers, x.requires_grad_()).sum().backward()


def test_hooks_of_parts_fire_once_and_those_of_the_whole_do_not() -> None:
    decoder = Decoder()
    fired: list[str] = []
    for name, module in decoder.named_modules():
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
    chain(layers_of(as_pipeline(decoder)), TOKENS)
    parts = ["model.embed_tokens", "model.norm", "lm_head"]
    assert sorted(fired) == sorted(
        [*parts, *(f"model.layers.{i}{part}" for i in range(3) for part in ("", ".mix"))]
    )


class Alternate(Backbone):
    def forward(self, *args: Any, **keys: Any) -> Tensor:
        x = self.embed_tokens(keys["input_ids"])
        for layer in self.layers[::2]:
            x = layer(x, torch.eye(x.shape[1]))
        return self.norm(x)


class Shortcut(Backbone):
    def forward(self, *args: Any, **keys: Any) -> Tensor:
        x = first = self.embed_tokens(keys["input_ids"])
        for index, layer in enumerate(self.layers):
            x = layer(x if index < 2 else x + first, torch.eye(x.shape[1]))
        return self.norm(x)


def test_a_forward_that_is_no_chain_is_refused() -> None:
    with pytest.raises(ModelError, match="forward runs 2 of its 3 layers"):
        chain(layers_of(as_pipeline(Decoder(Alternate()))), TOKENS)
    with pytest.raises(ModelError, match="what comes after layer 1 is given something else"):
        chain(layers_of(as_pipeline(Decoder(Shortcut()))), TOKENS)


def without(part: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        decoder = Decoder()
        owner = decoder if part == "lm_head" else decoder.model
        delattr(owner, part)
        return decoder

    return build


def replaced() -> nn.Module:
    decoder = Decoder()
    decoder.model.forward = decoder.model.forward  # type: ignore[method-assign]
    return decoder


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (without("lm_head"), "here is no lm_head"),
        (without("norm"), "here is no child with the others"),
        (without("layers"), "here is no child with the others"),
        (lambda: nn.Linear(2, 2), "Linear is not a decoder that can be cut"),
        (replaced, "forward of Decoder.model was replaced on the object"),
    ],
)
def test_a_model_of_another_shape_is_refused(build: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        as_pipeline(build())


def test_a_parameter_outside_of_the_parts_is_refused() -> None:
    decoder = Decoder()
    decoder.model.project = nn.Linear(8, 8, bias=False)
    with pytest.raises(ModelError, match=r"holds model\.project\.weight"):
        layers_of(as_pipeline(decoder))


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"input_ids": TOKENS, "labels": TOKENS}, "not labels; labels belong to the loss"),
        ({"input_ids": TOKENS, "token_type_ids": TOKENS}, "not token_type_ids$"),
        ({"attention_mask": PADDING}, "a dict that has them, got dict"),
        ((TOKENS, PADDING), "a dict that has them, got tuple"),
    ],
)
def test_a_batch_it_cannot_take_is_refused(batch: Any, why: str) -> None:
    model = as_pipeline(Decoder())
    for call in (model, layers_of(model)[0][1]):
        with pytest.raises(ModelError, match=why):
            call(batch)
