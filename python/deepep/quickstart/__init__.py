"""A small language model with one sharded MoE layer, trained on this machine and checked.

    python -m deepep.quickstart --help

Where to look: model.py has the model with its deepep.nn.ExpertParallel, train.py one rank's loop,
reference.py the same layer in one process, report.py what is printed.
"""
