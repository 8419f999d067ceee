# SPDX-License-Identifier: Apache-2.0
"""Every graph of workflows/, in the order of their numbers."""

from __future__ import annotations

from . import ltx, models, notes, parts, wan
from .graph import Graph
from .layout import Node
from .one_model import T2V, one_model
from .recipes import COGVIDEOX, COGVIDEOX_15, LATENT, Recipe, mochi

NOT_USED = "Negative prompt (not used: cfg is 1)"


def _whole(number: int, recipe: Recipe, notes_: tuple[Node, ...]) -> Graph:
    width, height, frames = recipe.pixels_and_frames
    return Graph(
        f"{number:02} {recipe.model} - {T2V}, {width}x{height}, {frames} frames",
        *(recipe.model, T2V, f"{width} x {height}, {frames} frames"),
        one_model(
            recipe.loaders,
            recipe.size,
            parts.prompts(),
            recipe.sampler,
            parts.watched(
                "7 Watch", (recipe.decode,), parts.saved(recipe.prefix), parts.video(recipe.fps)
            ),
            notes_,
        ),
    )


def _title(recipe: Recipe) -> str:
    width, height, frames = recipe.pixels_and_frames
    return f"{recipe.model}, {width} x {height}, {frames} frames"


def _mochi(number: int, frames: int, tokens: str, gain: str) -> Graph:
    recipe, fp8 = mochi(frames), models.MOCHI_FP8
    return _whole(
        number,
        recipe,
        (
            notes.start(_title(recipe), tokens, gain),
            notes.settings(),
            notes.files(
                models.MOCHI,
                f"Short of memory: [{fp8.file}]({fp8.url}) in place of the first. The VAE "
                "decodes in tiles, because a whole clip at once does not fit consumer cards.",
            ),
        ),
    )


def _cog(number: int, recipe: Recipe, texts: tuple[str, str, str]) -> Graph:
    """texts: tokens, gain, and what else the first note says."""
    todo = "Download every file that the note Models links"
    return _whole(
        number,
        recipe,
        (
            notes.start(_title(recipe), *texts, height=290, models=todo),
            notes.settings(height=290),
            notes.shards(recipe.shards, recipe.vae, models.T5, 290),
        ),
    )


def _hunyuan() -> Graph:
    diffusion, qwen, byt5, vae = models.HUNYUAN_15
    size = Node("size", "EmptyHunyuanVideo15Latent", (1280, 720, 121, 1), title=LATENT)
    return Graph(
        f"08 HunyuanVideo 1.5 - {T2V}, 1280x720, 121 frames",
        *("HunyuanVideo 1.5", T2V, "1280 x 720, 121 frames"),
        one_model(
            (
                models.diffusion(diffusion),
                models.text_encoder("hunyuan_video_15", qwen, byt5),
                models.vae(vae),
            ),
            size,
            parts.prompts(),
            parts.sampler(20, 6.0),
            parts.watched(
                "7 Watch",
                (parts.decode(),),
                parts.saved("hunyuan_video_1.5_sparge"),
                parts.video(24),
            ),
            (
                notes.start(
                    "HunyuanVideo 1.5, 1280 x 720, 121 frames",
                    "111,600 video tokens (31 x 45 x 80)",
                    "Nearly all of a step is attention: it gains most.",
                ),
                notes.settings(),
                notes.files(models.HUNYUAN_15),
            ),
        ),
    )


def _minimax() -> Graph:
    diffusion, text, vae, audio_vae = models.MINIMAX_H3
    size = Node("size", "EmptyMiniMaxH3LatentAV", (1344, 768, 124), title=LATENT)
    decode_sound = Node("sound", "VAEDecodeAudio", (), {"samples": "sampler", "vae": "vae_sound"})
    return Graph(
        f"10 MiniMax H3 - {T2V} with sound, 1344x768, 124 frames",
        *("MiniMax H3", f"{T2V} with sound", "1344 x 768, 124 frames"),
        one_model(
            (
                models.diffusion(diffusion),
                models.text_encoder("minimax", text),
                models.vae(vae, title="VAE of the picture"),
                models.vae(audio_vae, "vae_sound", "VAE of the sound"),
            ),
            size,
            parts.prompts(f"{parts.DOG} {parts.SOUNDS}", negative_title=NOT_USED),
            parts.sampler(20, 1.0, "res_multistep"),
            parts.watched(
                "7 Watch",
                (parts.decode(), decode_sound),
                parts.saved("minimax_h3_sparge"),
                parts.video(24, audio="sound"),
            ),
            (
                notes.start(
                    "MiniMax H3, 1344 x 768, 124 frames, with sound",
                    "37,296 video tokens (37 x 24 x 42)",
                    "Its sound and its text are computed in full. Lengths go in steps of 17: 124, "
                    "141 and so on, up to 362.",
                ),
                notes.settings(),
                notes.files(models.MINIMAX_H3),
            ),
        ),
    )


def _flux() -> Graph:
    diffusion, clip_l, t5, vae = models.FLUX
    save = Node("saved", "SaveImage", ("flux_sparge_2048",), {"images": "decode"})
    prompt = (
        "A mountain village at dawn seen from above, hundreds of slate roofs, smoke from chimneys, "
        "a river with a stone bridge, fields with hedges, far snowy peaks. Photograph, fine detail."
    )
    return Graph(
        "11 Flux dev - text to image, 2048x2048",
        *("Flux dev", "text to image", "2048 x 2048"),
        one_model(
            (
                models.diffusion(diffusion),
                models.text_encoder("flux", clip_l, t5),
                models.vae(vae),
            ),
            Node("size", "EmptySD3LatentImage", (2048, 2048, 1), title="Size"),
            parts.prompts(prompt, negative_title=NOT_USED),
            parts.sampler(20, 1.0),
            parts.watched("7 Look", (parts.decode(),), save),
            (
                notes.start(
                    "Flux dev, 2048 x 2048",
                    "16,384 image tokens (128 x 128)",
                    "At 1024 x 1024 it has 4,096, where there is hardly anything to gain.",
                ),
                notes.settings(what="picture"),
                notes.files(models.FLUX),
            ),
        ),
    )


def graphs() -> list[Graph]:
    return [
        _mochi(
            *(1, 163, "44,520 video tokens (28 x 30 x 53)"),
            "This is Mochi at its full length: most of a step is attention, so it gains much. It "
            "also needs the most memory; try settings in the graph of 85 frames.",
        ),
        _mochi(
            *(2, 85, "23,850 video tokens (15 x 30 x 53)"),
            "At 25 frames it has 7,950, where there is little to gain; at 163 it has 44,520 and "
            "gains more.",
        ),
        _cog(
            *(3, COGVIDEOX),
            (
                "17,550 video tokens (13 x 30 x 45)",
                "That is less than a long Mochi clip has, so expect a smaller gain.",
                "**A limit of ComfyUI 0.33**, with or without this node: it spaces the positions "
                "of CogVideoX 1.0 models 1.875 times too widely in height and width, so clips "
                "differ from the original code's. CogVideoX 1.5 is computed as published.",
            ),
        ),
        _cog(
            *(4, COGVIDEOX_15),
            (
                "44,880 video tokens (11 x 48 x 85)",
                "Most of a step is attention, so it gains more than CogVideoX 5B at 720 x 480.",
                "",
            ),
        ),
        wan.wan_22(5, "t2v"),
        wan.wan_22(6, "i2v"),
        wan.wan_21(),
        _hunyuan(),
        ltx.ltx_2(9),
        _minimax(),
        _flux(),
        wan.compare(),
    ]
