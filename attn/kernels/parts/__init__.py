"""What the kernels are made of, and no single one of them owns: each module is one idea of attention on matrix units."""
