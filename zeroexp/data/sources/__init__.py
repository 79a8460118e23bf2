"""Where tokens come from: one file per kind of ``data``, registered in
:mod:`zeroexp.data.sources.registry`."""
