"""The console command paro-plan, from a checkout."""

from paro_lm.tools.plan import main

if __name__ == "__main__":
    main()
