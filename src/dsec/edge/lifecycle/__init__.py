"""One sandbox's life: `machine.py` decides, `owner.py` acts in series, `journal.py` remembers."""
