"""Train: ``python train.py zero=stage3 trainer.devices=2``; ``-m`` for a sweep, ``--help`` for
more.
"""

import sys

from zeroexp.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
