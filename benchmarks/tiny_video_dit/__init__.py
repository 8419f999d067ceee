# SPDX-License-Identifier: Apache-2.0
"""Small video diffusion transformer in Wan's architecture, to judge sparse attention by.

scenes: what a clip shows, and the text that says so. clips: the pictures. latent: pictures to the
16 channels of Wan's latent and back, without a VAE. model: the network. train, sample: what they
say. checkpoint: the weights' file.
"""
