# SPDX-License-Identifier: Apache-2.0
"""Upstream SpargeAttn's functions, under their names, parameters and order.

Every parameter is honoured, or refused with `Unsupported` and a reason. What differs from upstream:

* `is_causal` holds element by element, not only for whole blocks; query i sees keys 0 to i, also
  where there are more keys than queries, or fewer.
* `return_lse` returns the natural log-sum-exp, last of what is returned.
* `scale` reaches block selection too; tails are averaged by their true length, so they are neither
  kept nor dense by accident; a query block that keeps no key gives zeros.
* `output_dtype` defaults to None, q's dtype (upstream's default said float16 and was ignored).
* `mask_id` has 128 x 64 blocks on every GPU; one of 64 x 128 blocks is read as well.
* the returned sparsity is 1 - kept / valid query-key pairs, forced blocks counted as kept.
* head_dim up to 128, any sequence length, and grouped-query heads are accepted.
* tuned files are loaded; nothing is tuned here.

The modules have upstream's names: `core`, `autotune`, `utils`.
"""

# The package has the names of its core, as upstream's has.
from .core import *  # noqa: F403
from .core import __all__  # noqa: F401
