"""Families that transformers' code runs, and of which something is stated."""

from __future__ import annotations

from tiermoe.model.families.family import Family


class Zaya(Family):
    name, model_type = "ZAYA1", "zaya"
    forecasts = normalised = False


class Switch(Family):
    name, model_type = "Switch Transformers", "switch_transformers"
    encoder_decoder = True
    adapter = "switch"
    forecasts = normalised = False


class SwitchEncoder(Family):
    """Switch Transformers' encoder alone."""

    name, model_type = "Switch Transformers (encoder alone)", "switch_transformers"
    encoder_class = "SwitchTransformersEncoderModel"
    adapter = "switch"
    forecasts = normalised = False
