"""What the server that ranks are forked from imports once, so that starting a rank is cheap."""

import espnet2.iterators.chunk_iter_factory
import espnet2.iterators.multiple_iter_factory  # noqa: F401
import numpy  # noqa: F401
import torch.distributed  # noqa: F401

import espnet_sync.synced_iter_factory  # noqa: F401
