"""Gates by name. A new gate is a file and a line here."""

from __future__ import annotations

from zeroexp.moe.expert_choice import ExpertChoiceGate
from zeroexp.moe.gate import Gate
from zeroexp.moe.sigmoid import SigmoidGate
from zeroexp.moe.top1 import Top1Gate
from zeroexp.moe.top2 import Top2Gate
from zeroexp.moe.topk import TopKGate

GATES: dict[str, type[Gate]] = {
    "top1": Top1Gate,
    "top2": Top2Gate,
    "topk": TopKGate,
    "expert_choice": ExpertChoiceGate,
    "sigmoid": SigmoidGate,
}


def usual_gate(top_k: int) -> str:
    """The gate for ``top_k`` where none is named."""
    return {1: "top1", 2: "top2"}.get(top_k, "topk")
