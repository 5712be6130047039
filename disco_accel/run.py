"""``accelerate launch ... -m disco_accel.run --config disco.yaml script.py``; see ``run_script``."""

from disco_accel.integrate.launch.run_script import main

if __name__ == "__main__":
    main()
