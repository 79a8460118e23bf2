"""Train: ``python train.py zero=stage3 trainer.devices=2``; ``-m`` for a sweep, ``--help`` for
more.
"""

import sys

try:
    from zeroexp.cli import main
except KeyboardInterrupt:  # importing takes some ten milliseconds, and main is not there to say it
    print("zeroexp: interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
