# SPDX-License-Identifier: Apache-2.0
"""Hosts of models, one module each. `import sparge` imports none of them."""
