"""DeepSpeed's asynchronous I/O, in its own environment.

    python -m benchmarks.peers.deepspeed_aio PATH BYTES BLOCK DEPTH BUFFER

BUFFER is ``pinned`` (its own page-locked memory) or ``tensor`` (the caller's). After the line
``ready`` it takes lines ``r`` or ``w`` and answers with the seconds of one pass over the file.
"""

from __future__ import annotations

import contextlib
import sys
import time


def main(path: str, num_bytes: int, block: int, depth: int, buffer: str) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        builder = AsyncIOBuilder()
        if not builder.is_compatible():
            raise SystemExit("DeepSpeed's aio needs libaio and its headers")
        handle = builder.load().aio_handle(block, depth, False, True, 1)
        example = torch.empty(0, dtype=torch.uint8)
        if buffer == "pinned":
            data = handle.new_cpu_locked_tensor(num_bytes, example).fill_(1)
        else:
            data = torch.ones(num_bytes, dtype=torch.uint8)
    print("ready", flush=True)
    for line in sys.stdin:
        transfer = handle.sync_pwrite if line[0] == "w" else handle.sync_pread
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            count = transfer(data, path, 0)
        seconds = time.perf_counter() - start
        if count != 1:
            raise SystemExit(f"DeepSpeed's aio gave {count}")
        print(f"{seconds:.9f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
