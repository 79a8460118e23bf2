"""Mixture of experts: gates, dispatch, experts, and the layer they make."""

from zeroexp.moe.bias import update_biases
from zeroexp.moe.capacity import Capacity
from zeroexp.moe.experts import MLP, ExpertParameter
from zeroexp.moe.gate import Gate
from zeroexp.moe.layer import MoE
from zeroexp.moe.model import (
    auxiliary_loss,
    count_parameters,
    expert_parameters,
    experts_left_out,
    moe_layers,
    name_layers,
    read_statistics,
)
from zeroexp.moe.registry import GATES
from zeroexp.moe.routing import Routing
from zeroexp.moe.statistics import Numbers

__all__ = [
    "GATES",
    "MLP",
    "Capacity",
    "ExpertParameter",
    "Gate",
    "MoE",
    "Numbers",
    "Routing",
    "auxiliary_loss",
    "count_parameters",
    "expert_parameters",
    "experts_left_out",
    "moe_layers",
    "name_layers",
    "read_statistics",
    "update_biases",
]
