"""One CPU thread per test process: the machines that run the tests share their cores, and waiting threads cost more than
they bring."""

import torch

torch.set_num_threads(1)
