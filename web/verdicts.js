// SPDX-License-Identifier: Apache-2.0
// Makes room for verdicts, and takes old ones off nodes that a run leaves out.

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"

const MUTED = 2, BYPASSED = 4
const TEXT = "$$node-text-preview"
// Pixels of a line of 48 letters; a node is as wide as its title otherwise.
const WIDTH = 350

const isOurs = (type) => /^Sparge/.test(type)

function removeText(node) {
  const place = node.widgets?.findIndex((widget) => widget.name === TEXT) ?? -1
  if (place < 0) return
  node.widgets[place].onRemove?.()
  node.widgets.splice(place, 1)
  node.setDirtyCanvas?.(true, true)
}

// Whether a node of ours was left out. isOff: all nodes of the graph are.
function clear(graph, isOff = false) {
  let found = false
  for (const node of graph?.nodes ?? []) {
    const off = isOff || node.mode === MUTED || node.mode === BYPASSED
    const left = node.subgraph ? clear(node.subgraph, off) : off && isOurs(node.type)
    if (left) removeText(node)
    found ||= left
  }
  return found
}

app.registerExtension({
  name: "sparge.verdicts",
  setup: () => api.addEventListener("execution_start", () => clear(app.rootGraph ?? app.graph)),
  nodeCreated(node) {
    if (isOurs(node.comfyClass)) node.setSize([Math.max(WIDTH, node.size[0]), node.size[1]])
  },
})
