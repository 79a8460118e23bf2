"""Lightning's precision strings, translated.

==============  =========  =======  ==========================================================
Trainer         compute    master   what it is
==============  =========  =======  ==========================================================
``32-true``     fp32       -        the default
``64-true``     fp64       -
``bf16-true``   bf16       none     weights and optimizer state in bf16 (``precision=bf16_pure``)
``bf16-mixed``  bf16       fp32     weights and matrix products in bf16, fp32 master weights
``16-mixed``    fp16       fp32     the same in fp16 with a loss scale (Lightning itself makes
                                    this ``bf16-mixed`` on a CPU; say fp16 in ``config``)
==============  =========  =======  ==========================================================

The ``mixed`` ones also run under autocast, as Lightning users expect: losses in fp32, operands of
    a product in
one dtype. Unlike stock autocast the weights themselves are low, so each module that owns
parameters takes its floating inputs in their dtype.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroexp.config import Config
from zeroexp.errors import ConfigError, ModelError, Problem
from zeroexp.strategies.compat import Namespace, namespace
from zeroexp.strategies.optimization import Optimization

# Lightning's string -> (compute, master)
STRINGS = {
    "32-true": ("fp32", "auto"),
    "64-true": ("fp64", "auto"),
    "bf16-true": ("bf16", "none"),
    "bf16-mixed": ("bf16", "fp32"),
    "16-mixed": ("fp16", "fp32"),
}
REFUSED = {
    "16-true": "fp16 weights without fp32 master weights lose small updates. Use 16-mixed.",
    "transformer-engine": "Use bf16-mixed.",
    "transformer-engine-float16": "Use 16-mixed.",
}
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def name_of(config: Config) -> str:
    """Lightning's string for a resolved precision section."""
    low = config.precision.master == "none" and config.precision.compute in ("bf16", "fp16")
    suffix = "true" if low else "mixed"
    bits = {"fp32": "32-true", "fp64": "64-true", "bf16": f"bf16-{suffix}", "fp16": f"16-{suffix}"}
    return bits[config.precision.compute]


def translate(config: Config, plugin: Any, ns: Namespace, fabric: bool = False) -> Config:
    """``config`` with the precision that Lightning's ``plugin`` stands for.

    An explicit ``precision.compute`` in the config and a different precision string are a
    contradiction; ``32-true``, which is also what Lightning sends when nothing was asked for,
    gives way.

    Raises:
        ConfigError: a precision that is not supported, or the contradiction.
    """
    plain, mixed, half, double = (
        (
            ns.FabricPrecision,
            ns.FabricMixedPrecision,
            ns.FabricHalfPrecision,
            ns.FabricDoublePrecision,
        )
        if fabric
        else (ns.Precision, ns.MixedPrecision, ns.HalfPrecision, ns.DoublePrecision)
    )
    string = str(getattr(plugin, "precision", type(plugin).__name__))
    known = type(plugin) is plain or isinstance(plugin, (mixed, half, double))
    if not known or string not in STRINGS:
        fix = REFUSED.get(string, f"Use one of {', '.join(STRINGS)}.")
        what = string if string in REFUSED else f"the plugin {type(plugin).__name__} ({string})"
        raise ConfigError([Problem("precision", f"{what} does not work with ZeroStrategy.", fix)])
    _check_scaler(plugin)
    compute, master = STRINGS[string]
    wanted = config.precision.compute
    if wanted != "auto":
        # Resolved for this machine: `auto` in the config's other precision keys has the same
        # reading.
        if string == "32-true" or string == name_of(config.resolved()):
            return config
        raise ConfigError(
            [
                Problem(
                    "precision.compute",
                    f"{wanted} in the strategy's config, and precision={string!r} for the Trainer.",
                    "Say it in one place.",
                )
            ]
        )
    return config.updated({"precision.compute": compute, "precision.master": master})


def _check_scaler(plugin: Any) -> None:
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    usual = torch.amp.GradScaler(device="cpu")
    asked = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    default = (usual.get_growth_factor(), usual.get_backoff_factor(), usual.get_growth_interval())
    if asked != default or scaler._init_scale != usual._init_scale:
        raise ConfigError(
            [
                Problem(
                    "precision.loss_scale",
                    "a GradScaler of one's own is not used: the engine scales the loss.",
                    "Set init, growth, backoff and interval in ZeroStrategy(config=...).",
                )
            ]
        )


def _cast(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not dtype:
            return value.to(dtype)
        return value

    return cast


def refuse_unsupported(module: nn.Module) -> None:
    """Raise :class:`ModelError` for modules that need weights and buffers in one dtype."""
    for name, owner in module.named_modules():
        if not isinstance(
            owner, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
        ):
            continue
        if owner.affine and owner.running_mean is not None:
            raise ModelError(
                f"{name} is a {type(owner).__name__}: its running statistics stay in fp32 and its"
                " weights are in the compute dtype, which torch does not multiply. Use"
                " precision='32-true' (or 'bf16-true', with low statistics), or a LayerNorm,"
                " GroupNorm or RMSNorm."
            )


def take_inputs_in(module: nn.Module, dtype: torch.dtype) -> list[Any]:
    """Let every module that owns floating parameters take its floating inputs in ``dtype``.

    Returns the handles of the hooks. Nested containers are searched; what is no tensor passes
    untouched.
    """
    cast = _cast(dtype)

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    return [
        owner.register_forward_pre_hook(hook, with_kwargs=True)
        for owner in module.modules()
        if owner is not module
        and any(p.is_floating_point() for p in owner.parameters(recurse=False))
    ]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Formats:
    """What both precision plugins share: dtypes of modules, of inputs, and in contexts."""

    precision: str

    def set_formats(self, config: Config, device_type: str) -> None:
        """Take the dtypes of a resolved config."""
        self.config = config
        self.precision = name_of(config)
        self.device_type = device_type
        self.compute = DTYPES[config.precision.compute]

    @property
    def is_mixed(self) -> bool:
        return self.precision.endswith("mixed")

    @property
    def is_plain(self) -> bool:
        return self.precision == "32-true"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Everything in the dtype of a ``true`` precision; ``mixed`` leaves buffers alone."""
        return module if self.is_mixed or self.is_plain else module.to(self.compute)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if not self.is_mixed and not self.is_plain:
            stack.enter_context(_default_dtype(self.compute))
        return stack

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        if self.is_mixed:
            return torch.autocast(self.device_type, dtype=self.compute, cache_enabled=False)
        return self.tensor_init_context()

    def convert_input(self, data: Any) -> Any:
        """Floating tensors of a batch in the dtype of a ``true`` precision."""
        if self.is_mixed or self.is_plain:
            return data
        return apply_to_collection(data, dtype=Tensor, function=_cast(self.compute))

    def convert_output(self, data: Any) -> Any:
        """Floating outputs in the default dtype, so that a loss made of them is not low."""
        if self.is_plain:
            return data
        return apply_to_collection(data, dtype=Tensor, function=_cast(torch.get_default_dtype()))


class PrecisionBehaviour(Formats):
    """The Trainer's precision plugin: clipping, backward and step go to the engine."""

    _after_closure: Any

    def __init__(
        self, config: Config, device_type: str, optimization: Optimization, ns: Namespace
    ) -> None:
        self.ns = ns
        self.set_formats(config, device_type)
        self._optimization = optimization

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time: a pickle names the namespace instead.
        return _blank, (self.ns.name,), dict(vars(self))

    # ------------------------------------------------------------------ backward, clip, step
    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run ``LightningModule.backward``, whose ``loss.backward()`` is the engine's."""
        self._optimization.run_backward(model.backward, tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Closure (forward, backward), hooks and clipping, then the step of the engine."""
        result = closure()
        if result is None and model.automatic_optimization:
            return result  # training_step returned None: there is no gradient
        self._optimization.finish(optimizer)
        overridden = self.ns.is_overridden("configure_gradient_clipping", model)
        with self._optimization.watch_clipping(overridden):
            self._after_closure(model, optimizer)
        self._optimization.step(optimizer, **kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        self._optimization.clip_norm(optimizer, float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        self._optimization.clip_value(optimizer, float(clip_val))

    # ------------------------------------------------------------------ loss scale in checkpoints
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimization.scalar_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimization.load_scalar_state(state_dict)


def _blank(name: str) -> Any:
    kind = precision_class(name)
    return kind.__new__(kind)


@cache
def precision_class(name: str) -> Any:
    """The precision plugin of ``ZeroStrategy`` in the namespace ``name``."""
    members = {"__module__": "zeroexp.strategies", "__doc__": PrecisionBehaviour.__doc__}
    bases = (PrecisionBehaviour, namespace(name).Precision)
    return types.new_class("ZeroPrecision", bases, exec_body=lambda space: space.update(members))
