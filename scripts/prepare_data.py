"""The console command paro-prepare, from a checkout."""

from paro_lm.tools.prepare import main

if __name__ == "__main__":
    main()
