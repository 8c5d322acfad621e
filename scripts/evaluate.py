"""The console command paro-eval, from a checkout."""

from paro_lm.tools.evaluate import main

if __name__ == "__main__":
    main()
