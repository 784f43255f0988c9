"""The UOp programs of attention: one algorithm in each file, and the steps for each matrix unit in the folders."""
