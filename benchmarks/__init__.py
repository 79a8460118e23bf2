"""Side-by-side measurements of zeroexp and its peers on the same work. Run, never imported:

    python -m benchmarks peers                     the environment DeepSpeed lives in (once)
    python -m benchmarks train gpt10 mlp gpt125    step time, memory and start of every mode
    python -m benchmarks kernel                    the kernels against torch's
    python -m benchmarks overhead                  the engine's own processor time in a step
    python -m benchmarks startup                   launch to first step, by launcher
    python -m benchmarks table                     docs/benchmarks.md from the result files

Each writes one JSON file to ``benchmarks/results``. Give the machine to it alone: with two ranks on
two cores anything else that runs shows up in the numbers.
"""
