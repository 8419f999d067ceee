# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in models of transformers.

from sparge.integrations.transformers import enable

sparse = enable(model, sparge.SparsePolicy(topk=0.3, attention_sink=True))
model.generate(**inputs)
print(sparse.report())
sparse.disable()
"""

from .enable import SparseModel, enable

__all__ = ["SparseModel", "enable"]
