"""The console command paro-reproduce, from a checkout."""

from paro_lm.tools.reproduce import main

if __name__ == "__main__":
    main()
