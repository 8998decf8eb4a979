"""Imports torch and checks its version. Packages that need torch import this module first."""

import torch

from torch_ckpt._base.version import check_torch_version

check_torch_version(torch.__version__)
