"""A decoder of transformers as layers that a pipeline can cut between (see
:mod:`zeroexp.pipeline.runtime.split`).

Known by its parts, not by its class: a module with ``lm_head`` and, in one child, ``embed_tokens``,
``layers`` and ``norm``. What its forward does between them (masks, rotary tables, scales of the
embedding and of the logits) differs from family to family, so it is not written here a second
time: the decoder's own forward runs on every stage, with the parts of other stages left out. The
weights are the decoder's own, under its names.

Between layers the residual stream (B, L, C) crosses, and the batch's mask and positions where it
has them; every stage makes its attention masks and rotary tables of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.errors import ModelError

STREAM = "hidden_states"
CARRIED = ("attention_mask", "position_ids")
"""What of a batch goes on to later stages."""

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What a decoder layer is called with, beside the residual stream."""


def as_pipeline(model: nn.Module) -> PipelinedDecoder:
    """``model``, a causal decoder of transformers, as a model that a pipeline can cut. It shares
    all parts and parameter names with ``model``, which stays as it is.

    Raises :class:`ModelError` for a model of another shape.
    """
    return PipelinedDecoder(model)


class PipelinedDecoder(nn.Module):
    """Tokens (B, L, int64), or a dict of ``input_ids`` and, if need be, ``attention_mask`` and
    ``position_ids``, to logits (B, L, V). ``decoder`` is the model it was made of.

    Keys and values are never cached. Gradient checkpointing is as it is set in the decoder's layers
    when they run. Hooks fire on the embedding, the decoder's layers, the norm and the head, not on
    the modules around them, which no stage runs whole.
    """

    decoder: nn.Module

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._backbone = _backbone_of(decoder)
        # The decoder's parts become this module's, so that names are its own: no child "decoder".
        self.__dict__["decoder"] = decoder
        self._parameters, self._modules = decoder._parameters, decoder._modules
        self._buffers = decoder._buffers
        self._non_persistent_buffers_set = decoder._non_persistent_buffers_set
        self.training = decoder.training

    def train(self, mode: bool = True) -> PipelinedDecoder:
        self.decoder.training = mode
        return super().train(mode)

    def forward(self, value: Any) -> Tensor:
        """The decoder's own forward. Raises :class:`ModelError` for a batch that a pipeline would
        not take either."""
        return _logits(self.decoder(**_batch(value), use_cache=False, return_dict=True))

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Embedding, decoder layers, norm and head: together :meth:`forward`."""
        run = _Run(self.decoder, self._backbone)
        backbone = run.backbone
        last = len(backbone.layers) - 1
        return [
            ("embed_tokens", _Embed(run, backbone.embed_tokens)),
            *(
                (f"layers.{index}", _DecoderLayer(run, layer, index, last=index == last))
                for index, layer in enumerate(backbone.layers)
            ),
            ("norm", backbone.norm),
            ("lm_head", _Head(run, self.decoder.get_submodule("lm_head"))),
        ]


# -- what a stage holds ----------------------------------------------------------------------------


class _Embed(nn.Module):
    def __init__(self, run: _Run, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self._run = run

    def forward(self, value: Any) -> Any:
        batch = _batch(value)
        carried = {name: batch[name] for name in CARRIED if name in batch}
        x_BLC = self._run.enter(batch["input_ids"], carried)
        return {STREAM: x_BLC, **carried} if carried else x_BLC


class _DecoderLayer(nn.Module):
    def __init__(self, run: _Run, layer: nn.Module, index: int, *, last: bool) -> None:
        super().__init__()
        self.layer = layer
        self._run, self._index, self._last = run, index, last

    def forward(self, value: Any) -> Any:
        carried = dict(value) if isinstance(value, dict) else {}
        x_BLC: Tensor = carried.pop(STREAM) if carried else value
        args, kwargs = self._run.given(x_BLC, carried)[self._index]
        # The stream by place: reentrant checkpointing sees no gradient of what comes by name.
        y_BLC: Tensor = self.layer(x_BLC, *args, **kwargs)
        return {STREAM: y_BLC, **carried} if carried and not self._last else y_BLC


class _Head(nn.Module):
    def __init__(self, run: _Run, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self._run = run

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self._run.leave(x_BLC)


# -- the decoder's own forward, without some of its parts ------------------------------------------


@dataclass(frozen=True)
class _Known:
    """What is ``given`` to each layer with streams of one ``key`` and the batch's ``tensors`` at
    ``versions``; held, so that no others take their place in memory."""

    key: tuple[Any, ...]
    tensors: dict[str, Tensor]
    versions: list[int]
    given: list[Given]


class _Run:
    """Runs ``decoder`` with other modules in the place of some. No module itself: what it refers to
    belongs to the layers."""

    def __init__(self, decoder: nn.Module, name: str) -> None:
        self._decoder, self._name = decoder, name
        self._known: _Known | None = None

    @property
    def backbone(self) -> Any:
        return self._decoder.get_submodule(self._name)

    def enter(self, tokens_BL: Tensor, carried: dict[str, Tensor]) -> Tensor:
        """What the first decoder layer gets of tokens."""
        x_BLC, given = self._through(carried, input_ids=tokens_BL)
        self._keep(x_BLC, carried, given)
        return x_BLC

    def given(self, x_BLC: Tensor, carried: dict[str, Tensor]) -> list[Given]:
        """What each decoder layer gets beside the stream: made once per micro-batch and stage, and
        once for all batches of one shape where there is neither a mask nor positions."""
        known = self._known
        if (
            known is None
            or known.key != self._key(x_BLC)
            or known.tensors.keys() != carried.keys()
            or any(known.tensors[name] is not tensor for name, tensor in carried.items())
            or known.versions != _versions(carried)
        ):
            # Of the stream only shape, dtype and device are looked at; NaN would tell otherwise.
            stream = x_BLC.new_full((1, 1, 1), math.nan).expand(x_BLC.shape)
            known = self._keep(x_BLC, carried, self._through(carried, inputs_embeds=stream)[1])
        return known.given

    def leave(self, x_BLC: Tensor) -> Tensor:
        """The logits of the normed stream."""
        backbone = self._hollow(lambda stream, *_, **__: stream, lambda _: x_BLC)
        decoder = _shell(self._decoder, children={self._name: backbone})
        # What enters only makes masks that nobody looks at: one token is enough.
        one = x_BLC.detach()[:1, :1]
        return _logits(decoder.forward(inputs_embeds=one, use_cache=False, return_dict=True))

    def _through(self, carried: dict[str, Tensor], **source: Tensor) -> tuple[Tensor, list[Given]]:
        """Forward from ``source`` past all decoder layers: the first one's stream, and what each
        gets beside it."""
        streams: list[Tensor] = []
        given: list[Given] = []

        def layer(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            given.append((args, kwargs))
            return norm(hidden_states)

        def norm(hidden_states: Tensor) -> Tensor:
            streams.append(hidden_states)
            return hidden_states

        self._hollow(layer, norm).forward(**source, **carried, use_cache=False)
        count = len(self.backbone.layers)
        if len(given) != count or len(streams) != count + 1:
            raise self._refusal(f"its forward runs {len(given)} of its {count} layers")
        for index, stream in enumerate(streams):
            if stream is not streams[0]:
                raise self._refusal(
                    f"what comes after layer {index - 1} is given something else than what that "
                    "layer returns (in old versions of transformers it is a tuple: use a newer one)"
                )
        return streams[0], given

    def _hollow(self, layer: Callable[..., Tensor], norm: Callable[[Tensor], Tensor]) -> nn.Module:
        """The backbone with ``layer`` in the place of each of its layers, and ``norm``."""
        layers = nn.ModuleList(_shell(each, forward=layer) for each in self.backbone.layers)
        children = {"layers": layers, "norm": _shell(self.backbone.norm, forward=norm)}
        return _shell(self.backbone, children=children)

    def _keep(self, x_BLC: Tensor, carried: dict[str, Tensor], given: list[Given]) -> _Known:
        self._known = _Known(self._key(x_BLC), dict(carried), _versions(carried), given)
        return self._known

    def _key(self, x_BLC: Tensor) -> tuple[Any, ...]:
        # Which masks there are is the attention's choice, which can be changed at any time; and
        # tables made in inference mode are no good for training.
        attention = getattr(getattr(self._decoder, "config", None), "_attn_implementation", None)
        inference = torch.is_inference_mode_enabled()
        return tuple(x_BLC.shape), x_BLC.dtype, x_BLC.device, attention, inference

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"{type(self._decoder).__name__} cannot be cut into stages: {why}")


def _versions(tensors: Mapping[str, Tensor]) -> list[int]:
    """How often each was changed in place; tensors of inference mode do not say."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors.values()]


def _shell(
    module: nn.Module,
    *,
    children: Mapping[str, nn.Module] | None = None,
    forward: Callable[..., Any] | None = None,
) -> nn.Module:
    """``module`` once more, all of it shared, but with other ``children`` or another ``forward``,
    and without hooks."""
    shell = type(module).__new__(type(module))
    shell.__dict__.update(module.__dict__)
    shell.__dict__.update((k, v) for k, v in nn.Module().__dict__.items() if "hooks" in k)
    shell.__dict__.pop("_compiled_call_impl", None)
    shell.__dict__["_modules"] = {**module._modules, **(children or {})}
    if forward is not None:
        shell.__dict__["forward"] = forward
    return shell


# -- what comes in and out -------------------------------------------------------------------------


def _backbone_of(decoder: nn.Module) -> str:
    """The name of the child with ``embed_tokens``, ``layers`` and ``norm``."""
    wanted = ("embed_tokens", "layers", "norm")
    children = dict(decoder.named_children())
    found = [name for name, child in children.items() if {*wanted} <= {*child._modules}]
    kind = type(decoder).__name__
    if "lm_head" not in children or len(found) != 1:
        missing = "no lm_head" if "lm_head" not in children else "no child with the others"
        raise ModelError(
            f"{kind} is not a decoder that can be cut: that has lm_head and one child with "
            f"{', '.join(wanted)}, as a causal Llama of transformers does; here is {missing}. Give "
            "the model a method pipeline_layers() of its own instead"
        )
    for name, module in ((kind, decoder), (f"{kind}.{found[0]}", children[found[0]])):
        if "forward" in module.__dict__:
            raise ModelError(
                f"the forward of {name} was replaced on the object, so a stage cannot run its own "
                "part of it. Undo that (device_map of transformers does it), or subclass the model"
            )
    return found[0]


def _batch(value: Any) -> dict[str, Tensor]:
    """``input_ids`` and what there is of :data:`CARRIED`."""
    if isinstance(value, Tensor):
        return {"input_ids": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("input_ids"), Tensor):
        raise ModelError(
            f"a decoder in a pipeline takes input_ids, a tensor, or a dict that has them, got "
            f"{type(value).__name__}"
        )
    known = ("input_ids", *CARRIED)
    odd = [str(name) for name in value if name not in known and value[name] is not None]
    if odd:
        raise ModelError(
            f"a decoder in a pipeline takes {', '.join(known)}, not {', '.join(odd)}"
            + ("; labels belong to the loss, as its targets" if "labels" in odd else "")
        )
    return {name: value[name] for name in known if value.get(name) is not None}


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the decoder returned {type(output).__name__} without logits: as_pipeline takes a "
            "model with a language model's head"
        )
    return logits
