"""The console command paro-inspect, from a checkout."""

from paro_lm.tools.inspect import main

if __name__ == "__main__":
    main()
