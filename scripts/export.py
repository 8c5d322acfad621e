"""The console command paro-export, from a checkout."""

from paro_lm.tools.export import main

if __name__ == "__main__":
    main()
