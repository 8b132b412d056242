"""Names that torch has, but promises to no one, each under a name of ours.

Torch's own optimizers are made of the operations on lists of tensors. Nothing public does in one call what they do.
`tests/test_torch_private.py` calls each of them, and says what depends on it.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils import _pytree

# `torch.compiler.disable` without its imports
disable_dynamo = _disable_dynamo
pytree = _pytree

foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_pow_ = torch._foreach_pow_
fused_adam_ = torch._fused_adam_


def storage_id(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object, which views of the tensor share."""
    return tensor.untyped_storage()._cdata
