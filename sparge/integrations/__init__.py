# SPDX-License-Identifier: Apache-2.0
"""Frameworks, one package each. `import sparge` imports none of them."""
