"""A layer of a model that a pipeline can cut, counted per token without torch."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.layout import ITEMSIZE, ParamSpec
from zeroexp.pipeline.cut import Layer


@dataclass(frozen=True)
class LayerShape:
    """``prefixes`` begin the names of the layer's parameters. Per token: ``weights`` are the matrix
    elements that it is multiplied with, ``attention`` the width of all heads together, ``kept`` the
    elements that forward leaves for backward in the compute dtype, ``kept_bytes`` what it leaves in
    other types (token ids, the loss), ``width`` the elements that it gives on. ``beside``: bytes
    that it gives on with a micro-batch of any size. ``recomputed``: backward runs forward again.
    """

    name: str
    prefixes: tuple[str, ...]
    width: int
    weights: int = 0
    attention: int = 0
    kept: int = 0
    kept_bytes: int = 0
    beside: int = 0
    recomputed: bool = False

    def names_of(self, spec: ParamSpec) -> tuple[str, ...]:
        """The names by which this layer holds a parameter; none if it does not."""
        return tuple(n for n in (spec.name, *spec.aliases) if n.startswith(self.prefixes))

    def layer(self, params: int, tokens: int, seq_len: int, dtype: str) -> Layer:
        """What the layer costs for a micro-batch of ``tokens``: arithmetic in GFLOP in the place of
        seconds, bytes.

        A matrix costs 2 FLOPs an element in forward and in each of the two gradients; attention, as
        in PaLM (arXiv:2204.02311, appendix B), 4 x width x length and twice that in backward, where
        there are no weights.
        """
        itemsize = ITEMSIZE[dtype]
        matrices, scores = 2 * self.weights, 4 * self.attention * seq_len
        forward = matrices + scores
        return Layer(
            self.name,
            params,
            forward=tokens * forward / 1e9,
            input_grad=tokens * (matrices + 2 * scores + self.recomputed * forward) / 1e9,
            weight_grad=tokens * matrices / 1e9,
            activations=tokens * (self.kept * itemsize + self.kept_bytes),
            output=tokens * self.width * itemsize + self.beside,
        )
