"""Says what of a machine deepep can use, and how to put right what it cannot.

    python -m deepep.doctor --hidden 7168 --dtype fp8 --ranks 8

machine.py reads files and runs programs, facts.py makes facts of that, checks.py findings of facts.
Needs neither torch, GPU, driver nor libraries: each that is missing is a finding.
"""
