"""What tests of kernels need: a pool of rank processes, slow references, tolerances with reasons."""
