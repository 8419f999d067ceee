# SPDX-License-Identifier: Apache-2.0
"""Makes the graphs of workflows/, their pictures, and the blueprints of subgraphs/:
`python -m tools.graphs`.

The JSON is never edited by hand; a test compares it with what is made here.
"""
