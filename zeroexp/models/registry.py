"""The built-in model families by ``model.kind``. A new model is a family in a file of its own and
one line here."""

from __future__ import annotations

from zeroexp.models.family import Family
from zeroexp.models.gpt_family import GPT_FAMILY
from zeroexp.models.mlp_family import MLP_FAMILY

FAMILIES: dict[str, Family] = {"gpt": GPT_FAMILY, "mlp": MLP_FAMILY}
