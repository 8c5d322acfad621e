"""The console command paro-generate, from a checkout."""

from paro_lm.tools.generate import main

if __name__ == "__main__":
    main()
