"""The console command paro-calibrate, from a checkout: torchrun --nproc-per-node N scripts/calibrate.py name=mine"""

from paro_lm.tools.calibrate import main

if __name__ == "__main__":
    main()
