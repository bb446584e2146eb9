"""The process group of a rank that is alone."""

import pytest
import torch

from streamrl.learner.comm import Comm, Rendezvous


@pytest.fixture(scope="module")
def comm():
    held = Rendezvous("127.0.0.1", 1)
    comm = Comm.join(0, 1, torch.device("cpu"), rendezvous=held.address, held=held, timeout_s=30.0)
    yield comm
    comm.leave()
