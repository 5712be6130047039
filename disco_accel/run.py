"""``accelerate launch ... -m disco_accel.run --config disco.yaml script.py``; see ``integrate/run.py``."""

from disco_accel.integrate.run import main

if __name__ == "__main__":
    main()
