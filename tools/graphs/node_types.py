# SPDX-License-Identifier: Apache-2.0
"""Nodes in use, as ComfyUI 0.33 has them: sockets, widgets, and the height that they take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Socket:
    """Input or output. optional inputs need no link, nor does one that is a widget."""

    name: str
    kind: str
    optional: bool = False
    widget: bool = False


@dataclass(frozen=True)
class NodeType:
    """A kind of node.

    Attributes:
        inputs, outputs: its sockets, in order.
        widgets: kinds of its widgets' values in the order of the frontend: s text, i whole number,
            f number, b yes or no.
        height: pixels below the title that it takes in either UI, after a run too.
    """

    inputs: tuple[Socket, ...]
    outputs: tuple[Socket, ...]
    widgets: str
    height: int


def _sockets(text: str) -> tuple[Socket, ...]:
    """Reads "name:KIND other?:KIND"; a KIND alone is its own name, a question mark is optional."""
    found = []
    for word in text.split():
        name, _, kind = word.partition(":")
        found.append(Socket(name.rstrip("?"), kind or name, name.endswith("?")))
    return tuple(found)


def _type(inputs: str, outputs: str, widgets: str, height: int) -> NodeType:
    return NodeType(_sockets(inputs), _sockets(outputs), widgets, height)


#: Two lines of text below the widgets.
_LINES = 70
#: A picture on a node, or a clip.
_PICTURE = 330

NOTE = "MarkdownNote"
#: Those that the notes call green.
ABOUT_ATTENTION = ("SpargeAttention", "SpargeAttentionReport", "SpargeAttentionCompare")
OURS = (*ABOUT_ATTENTION, "SpargeCogVideoXLoad")

#: Kinds of the widgets that a link feeds, by name; of others, that of a choice.
WIDGET_KINDS = {
    "text": "STRING",
    **dict.fromkeys(
        ("seed", "noise_seed", "steps", "width", "height", "length", "frames_number"), "INT"
    ),
}

_CONDITIONED = "model:MODEL positive:CONDITIONING negative:CONDITIONING latent_image:LATENT"

NODE_TYPES = {
    "UNETLoader": _type("", "MODEL", "ss", 90),
    "CLIPLoader": _type("", "CLIP", "sss", 118),
    "DualCLIPLoader": _type("", "CLIP", "ssss", 146),
    "VAELoader": _type("", "VAE", "s", 90),
    "LoadImage": _type("", "IMAGE MASK", "ss", 370),
    "CLIPTextEncode": _type("clip:CLIP", "CONDITIONING", "s", 130),
    "ConditioningZeroOut": _type("conditioning:CONDITIONING", "CONDITIONING", "", 64),
    "ModelSamplingSD3": _type("model:MODEL", "MODEL", "f", 66),
    "PrimitiveInt": _type("", "INT", "is", 86),
    "EmptyMochiLatentVideo": _type("", "LATENT", "iiii", 150),
    "EmptyHunyuanLatentVideo": _type("", "LATENT", "iiii", 150),
    "EmptyHunyuanVideo15Latent": _type("", "LATENT", "iiii", 150),
    "EmptyMiniMaxH3LatentAV": _type("", "LATENT", "iii", 122),
    "EmptySD3LatentImage": _type("", "LATENT", "iii", 122),
    "WanImageToVideo": _type(
        "positive:CONDITIONING negative:CONDITIONING vae:VAE "
        "clip_vision_output?:CLIP_VISION_OUTPUT start_image?:IMAGE",
        "positive:CONDITIONING negative:CONDITIONING latent:LATENT",
        "iiii",
        230,
    ),
    "CheckpointLoaderSimple": _type("", "MODEL CLIP VAE", "s", 130),
    "LTXAVTextEncoderLoader": _type("", "CLIP", "sss", 118),
    "LTXVAudioVAELoader": _type("", "VAE", "s", 90),
    "LatentUpscaleModelLoader": _type("", "LATENT_UPSCALE_MODEL", "s", 90),
    "EmptyLTXVLatentVideo": _type("", "LATENT", "iiii", 150),
    "LTXVEmptyLatentAudio": _type("audio_vae:VAE", "LATENT", "ifi", 140),
    "LTXVConcatAVLatent": _type(
        "video_latent:LATENT audio_latent:LATENT", "latent:LATENT", "", 64
    ),
    "LTXVSeparateAVLatent": _type(
        "av_latent:LATENT", "video_latent:LATENT audio_latent:LATENT", "", 64
    ),
    "LTXVLatentUpsampler": _type(
        "samples:LATENT upscale_model:LATENT_UPSCALE_MODEL vae:VAE", "LATENT", "", 84
    ),
    "LTXVAudioVAEDecode": _type("samples:LATENT audio_vae:VAE", "AUDIO", "", 64),
    "KSamplerSelect": _type("", "SAMPLER", "s", 64),
    "ManualSigmas": _type("", "SIGMAS", "s", 64),
    "SamplerCustom": _type(
        "model:MODEL positive:CONDITIONING negative:CONDITIONING sampler:SAMPLER sigmas:SIGMAS "
        "latent_image:LATENT",
        "output:LATENT denoised_output:LATENT",
        "bisf",
        270,
    ),
    "KSampler": _type(_CONDITIONED, "LATENT", "isifssf", 266),
    "KSamplerAdvanced": _type(_CONDITIONED, "LATENT", "sisifssiis", 338),
    "VAEDecode": _type("samples:LATENT vae:VAE", "IMAGE", "", 64),
    "VAEDecodeTiled": _type("samples:LATENT vae:VAE", "IMAGE", "iiii", 154),
    "VAEDecodeAudio": _type("samples:LATENT vae:VAE", "AUDIO", "", 64),
    "CreateVideo": _type("images:IMAGE audio?:AUDIO", "VIDEO", "fi", 114),
    "SaveVideo": _type("video:VIDEO", "video:VIDEO", "sss", 130 + _PICTURE),
    "SaveImage": _type("images:IMAGE", "images:IMAGE", "s", 70 + _PICTURE),
    "SpargeAttention": _type(
        "model:MODEL profile?:SPARGE_PROFILE", "MODEL", "ssffisb", 226 + _LINES
    ),
    "SpargeAttentionReport": _type(
        "model:MODEL latent:LATENT",
        "latent:LATENT text:STRING picture:IMAGE",
        "s",
        134 + _LINES + _PICTURE,
    ),
    "SpargeAttentionCompare": _type(
        "reference:IMAGE clip:IMAGE", "comparison:IMAGE text:STRING", "s", 106 + _LINES + _PICTURE
    ),
    "SpargeCogVideoXLoad": _type("", "MODEL", "ss", 112),
    NOTE: _type("", "", "s", 200),
}  # fmt: skip
