# SPDX-License-Identifier: Apache-2.0
"""Model of the clocks that an SM takes for a block of 128 queries x 64 keys, read from SASS.

It needs no GPU: it serves those that nobody has measured. It knows the instructions of the main
loop, their registers, the pipes of a GPU and a fixed time of each instruction. It does not know
what L2 and DRAM do, nor banks of shared memory. On an H100 it was up to 15 % too fast:
docs/experiments.md, Issue model, has what it foretold and what was measured.
"""
