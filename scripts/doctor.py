"""The console command paro-doctor, from a checkout."""

from paro_lm.tools.doctor import main

if __name__ == "__main__":
    main()
