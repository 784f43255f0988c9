"""A model that steps through the machine code of the hot loop, cycle by cycle: the machine as data (machine), an instruction as what it needs and
takes (steps), addresses and the banks of LDS that they meet in (addresses), the waves of a compute unit (waves), a kernel's loops (trips), what a
problem takes (predict), kernels of ours and others (kernels), and what is printed and drawn of it (tables, drawing). docs/timing.md has predictions
beside what was measured."""
