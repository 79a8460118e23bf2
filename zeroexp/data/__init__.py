"""Token data: where the text comes from, and which sequences each rank reads at each step.

Sources, sampling and checks import no torch; :mod:`zeroexp.data.dataset` and
:mod:`zeroexp.data.loader` do.
"""
