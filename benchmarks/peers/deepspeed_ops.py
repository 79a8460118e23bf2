"""Compiles what DeepSpeed compiles on first use, in its own environment, before anything is timed.

    python -m benchmarks.peers.deepspeed_ops

One line on standard output for each that cannot be had.
"""

from __future__ import annotations

import contextlib
import sys

OPS = ("ShareMemCommBuilder", "CPUAdamBuilder", "AsyncIOBuilder")


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.accelerator import (  # type: ignore[import-not-found, unused-ignore]
            get_accelerator,
        )

    for name in OPS:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                builder = get_accelerator().create_op_builder(name)
                if not builder.is_compatible():
                    raise RuntimeError("not possible here")
                builder.load(verbose=False)
        except Exception as error:  # a compiler, a linker, ninja, a header
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            print(f"missing: DeepSpeed's {name.removesuffix('Builder')}: {last}", flush=True)


if __name__ == "__main__":
    main()
