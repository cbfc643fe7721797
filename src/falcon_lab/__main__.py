"""``python -m falcon_lab`` is ``falcon-lab``."""

from falcon_lab.cli import main

if __name__ == "__main__":
    main()
