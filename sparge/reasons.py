# SPDX-License-Identifier: Apache-2.0
"""Reasons why calls were served as they were: sentences, and what a node has room for."""

from __future__ import annotations

_SAME = "Nothing to change: it runs as without the node"
_CUDA = "Install PyTorch with CUDA"
_NVIDIA = "Take an NVIDIA GPU, RTX 30 (Ampere) or newer"
_DRIVER = "Install a new NVIDIA driver"
_REPORT = "Please report it: the log has the error"
_LARGER, _SMALLER = "Render larger or longer", "Render smaller or shorter"
_STEPS = "Take more steps, or set mode to manual"
_LAST = "Put it last, before the sampler"
_COMPARE = "compare with the node bypassed"
#: Kinds of reasons: what kept a run from skipping work, in at most 31 characters, and what its user
#: can do, in at most 48. Of a remark on a run that did skip work a node shows the latter alone.
LINES = {
    "other": ("such calls are not served", "The sentence below says why"),
    # The machine.
    "no NVIDIA GPU": ("this is no NVIDIA GPU", _NVIDIA),
    "PyTorch for CPUs": ("PyTorch for the CPU alone", f"{_CUDA}, for an NVIDIA GPU"),
    "broken GPU": ("the GPU gave an error", f"{_DRIVER}, and restart"),
    "no CUDA": ("this PyTorch has no CUDA", _CUDA),
    "no GPU": ("no NVIDIA GPU was found", _DRIVER),
    "old GPU": ("this GPU is too old", _NVIDIA),
    "new GPU": ("this GPU is not supported yet", "Look for an update of Sparge Attention"),
    "no compiler": ("CUDA's compiler is missing", f"{_CUDA} again"),
    "old PyTorch": ("PyTorch is older than this GPU", "Update PyTorch"),
    "compile": ("a kernel did not compile", _REPORT),
    "load": ("the driver took no kernel", f"{_DRIVER}, or run again"),
    "not ready": ("the kernels are not ready", "Run again; the log has the error"),
    "wrong": ("the kernels fail on this GPU", _REPORT),
    "memory": ("too little GPU memory", f"{_SMALLER}, or free memory"),
    "two devices": ("the model is on two devices", "Load the whole model on one GPU"),
    "error": ("an error of Sparge Attention", _REPORT),
    # The run.
    "not run": ("the model did not run", "Connect the model to the sampler that runs"),
    "stopped": ("it was stopped too early", "Let it run to its end"),
    "small": ("too small ({tokens} of {least})", f"{_LARGER}, or lower min_tokens"),
    "large": ("too large", _SMALLER),
    "slow": ("slower at this size", f"{_LARGER}, or skip more"),
    "text": ("too small beside its text", f"{_LARGER}, or shorten the prompt"),
    "before": ("no step after start_percent", "Lower start_percent, or take more steps"),
    "after": ("no step before end_percent", "Raise end_percent"),
    "between": ("start_percent above end_percent", "Set start_percent below end_percent"),
    "start step": ("no step after start_step", "Lower start_step, or take more steps"),
    "one step": ("the run has one step", "Set mode to manual and start_percent to 0"),
    "listed": ("dense_blocks lists all layers", "Shorten or clear dense_blocks"),
    "unlisted": ("dense_blocks", "Some of dense_blocks are not in this model"),
    "measuring": ("measuring took all the steps", _STEPS),
    "few steps": ("too few steps to gain from it", _STEPS),
    # The model.
    "mask": ("the model uses a mask", "Remove masks that nodes put on attention"),
    "uneven": ("prompts differ in length", "Take prompts of one length, or a batch of one"),
    "graph": ("a mask in a CUDA graph", "Turn CUDA graphs off in the compile node"),
    "frames": ("it attends frame by frame", "Set mode to manual"),
    "parts": ("a node adds or merges tokens", "Remove that node, or set mode to manual"),
    "beside": ("only text or sound came here", _LAST),
    "own": ("the model's own attention", _SAME),
    "dtype": ("the model's number format", "Load the model in bf16, fp16 or fp32"),
    "training": ("a node trains the model", "Take this node out of training graphs"),
    "range": ("numbers too large for 8 bits", _SAME),
    "NaN": ("the model gave NaN or inf", "Try the model in bf16 or fp32"),
    # Other nodes.
    "no call": ("no attention came to this node", _LAST),
    "fullgraph": ("no attention came to this node", "Turn fullgraph off in the compile node"),
    "replaced": ("another node took its place", "Remove other attention nodes, or put it last"),
    "changed": ("another node changes attention", "Remove other attention nodes to skip work"),
    "checking": ("checking another node's work", "Take more steps, or remove that node"),
    "core": ("Model Sparse Attention wins", "Remove Model Sparse Attention, or this node"),
    # Remarks on runs that skip work.
    "NaN found": ("NaN", "NaN in the result: see if topk 1 gives it, too"),
    "unknown": ("a model unknown here", f"Unknown model: {_COMPARE}"),
    "tokens": ("unusual tokens", f"Unusual tokens: {_COMPARE}"),
    "parts kept": ("parts", "A node adds or merges tokens: compare results"),
    "second model": ("a second model", "A second model runs with these settings, too"),
}


class Reason(str):
    """Sentence for the user, with the lines of its kind."""

    kind: str
    least: int
    """Number of tokens that a call should have had."""

    def __new__(cls, sentence: str, kind: str = "", least: int = 0) -> Reason:
        made = super().__new__(cls, sentence)
        made.kind, made.least = kind or getattr(sentence, "kind", "other"), least
        return made

    def lines(self, tokens: int = 0) -> list[str]:
        """Two lines of a run that skipped nothing, and the sentence. tokens: of such calls."""
        what, remedy = LINES[self.kind]
        what = f"Nothing skipped: {what.format(tokens=tokens, least=self.least)}"
        return [what, remedy, f"{self[:1].upper()}{self[1:]}".rstrip(".") + "."]
