"""What the planner and the reports ask of a model, answered without torch."""

from __future__ import annotations

from zeroexp.config.sections import ModelConfig, MoeConfig
from zeroexp.errors import ModelError
from zeroexp.layout import ParamSpec
from zeroexp.models.family import Family
from zeroexp.models.registry import FAMILIES
from zeroexp.plan.layer_shape import LayerShape

FLOPS_FORMULA = (
    "6*N + 12*layers*heads*head_dim*seq_len FLOPs per token, forward and backward (3x forward); "
    "N: weights that a token is multiplied with (output head counted, embedding look-ups, norms "
    "and biases not; of experts those that a token takes); attention without the causal half, "
    "recomputation not counted; PaLM, arXiv:2204.02311, appendix B"
)
"""The rule behind :func:`flops_per_token`, to be printed beside every MFU."""


_DENSE = MoeConfig()


def is_built_in(model: ModelConfig) -> bool:
    """True if :func:`param_specs` knows the model; an external one can only be asked by building
    it."""
    return model.kind in FAMILIES


def _family(model: ModelConfig) -> Family:
    try:
        return FAMILIES[model.kind]
    except KeyError:
        raise ModelError(
            f"model.kind={model.kind} cannot be described without importing "
            f"{model.target or 'it'}: build it on the meta device and read its parameters there"
        ) from None


def param_specs(model: ModelConfig, moe: MoeConfig = _DENSE) -> list[ParamSpec]:
    """Name and shape of every parameter, in the order of the module's ``named_parameters()``.

    A tied parameter is listed once, under its first name, with the others in ``aliases``. Raises
    :class:`ModelError` for a model that is not built in and :class:`ConfigError` for sizes that do
    not fit together.
    """
    return _family(model).param_specs(model, moe)


def num_params(model: ModelConfig, moe: MoeConfig = _DENSE) -> int:
    """Elements of all parameters, tied ones once."""
    return sum(spec.numel for spec in param_specs(model, moe))


def num_active_params(model: ModelConfig, moe: MoeConfig = _DENSE) -> int:
    """The same without the experts that a token leaves out."""
    return num_params(model, moe) - _family(model).idle_params(model, moe)


def layer_shapes(
    model: ModelConfig, moe: MoeConfig = _DENSE, *, recompute: bool = False
) -> list[LayerShape]:
    """The layers that a pipeline can cut between, as the module's ``pipeline_layers()`` gives them.
    ``recompute``: blocks keep their input alone for backward."""
    return _family(model).layer_shapes(model, moe, recompute)


def flops_per_token(model: ModelConfig, seq_len: int, moe: MoeConfig = _DENSE) -> int:
    """Floating-point operations of one token's forward and backward by :data:`FLOPS_FORMULA`.

    For a GPT with multi-head attention and an MLP of 4x the width this is the model FLOPs of
    Korthikanti et al. (arXiv:2205.05198, equation 7) per token.
    """
    family = _family(model)
    return 6 * family.matmul_weights(model, moe) + 12 * family.attention_width(model) * seq_len
