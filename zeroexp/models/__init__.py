"""Built-in models. :mod:`zeroexp.models.specs` describes them without torch;
:mod:`zeroexp.models.build` makes them."""
